// Chats that survive a reload: in this browser, and nowhere else.
//
// A chat is {id, time, mode, system, models: [left, right], turns}; a turn is {text, answers}, with an
// answer {content, model, seed, note, isFault} for each side, or null.

const KEY = "pyggml.chats";
const MOST = 100;

export function newChat(mode, system, models) {
  return { id: newId(), time: Date.now(), mode, system, models, turns: [] };
}

// crypto.randomUUID is there on TLS and this machine alone.
const newId = () => [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("");

export function titleOf(chat) {
  const [line] = (chat.turns[0]?.text ?? "").trim().split("\n");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}

// What a side's model is sent: the turns that it has answered, and the one that it is asked.
export function messagesOf(chat, side, last) {
  const messages = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  for (const { text, answers } of chat.turns.slice(0, last))
    if (answers[side]?.content)
      messages.push({ role: "user", content: text }, { role: "assistant", content: answers[side].content });
  return [...messages, { role: "user", content: chat.turns[last].text }];
}

// The chats with one of them new or changed: newest first.
export function merged(chats, chat) {
  const others = chats.filter(({ id }) => id !== chat.id);
  return [chat, ...others].sort((a, b) => b.time - a.time).slice(0, MOST);
}

// What a stored text holds; what is none of ours, or damaged, is left out.
export function parsed(text) {
  try {
    const found = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? found.filter(isChat) : [];
  } catch {
    return [];
  }
}

const isChat = (chat) =>
  typeof chat?.id === "string" && Number.isFinite(chat.time) && ["chat", "text"].includes(chat.mode) &&
  typeof chat.system === "string" && Array.isArray(chat.models) && Array.isArray(chat.turns) &&
  chat.turns.every((turn) => typeof turn?.text === "string" && Array.isArray(turn.answers));

export function pastChats() {
  try {
    return parsed(localStorage.getItem(KEY));
  } catch {
    return []; // this browser keeps nothing
  }
}

// Keep a chat, and as many older ones as there is room for; a sentence if the browser keeps none.
export function keep(chat) {
  return write(merged(pastChats(), chat));
}

export function drop(id) {
  return write(pastChats().filter((chat) => chat.id !== id));
}

function write(chats) {
  for (let n = chats.length; n >= 0; n = n > 1 ? n >> 1 : n - 1) {
    try {
      localStorage.setItem(KEY, JSON.stringify(chats.slice(0, n)));
      return n < chats.length ? `The browser has no more room: ${chats.length - n} old chats are gone.` : "";
    } catch {
      continue;
    }
  }
  return "This browser keeps no chats: they end with this page.";
}
