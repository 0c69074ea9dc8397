// What the page asks of its server.

let key = "";

export const useKey = (given) => (key = given);

// Raises an Error with the server's sentence; `status` tells that a key is missing.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const fault = await response.json().catch(() => null);
  const message = fault?.error?.message ?? `the server answered ${response.status}`;
  throw Object.assign(new Error(message), { status: response.status });
}

// The objects of a stream of server-sent events.
export async function* events(path, body, signal) {
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
