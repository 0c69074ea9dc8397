"""What a container has: the least of what Linux' control groups and the machine grant."""

import psutil
import pytest

from pyggml import granted

OF_2 = "memory.max", "memory.current", "inactive_file", ""
OF_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory"


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes the files of a group; the process is in a/b."""
    monkeypatch.setattr(granted, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(granted, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("5:cpu,cpuacct:/a/b\n4:memory:/a/b\n3:pids:/\n0::/a/b\n")

    def write(path, **files):
        folder = tmp_path / "groups" / path
        assert folder.is_relative_to(tmp_path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    return write


@pytest.mark.parametrize("names", [OF_2, OF_1], ids=["version 2", "version 1"])
def test_a_container_s_limit_of_memory_is_the_machine_s(group, monkeypatch, names):
    machine = psutil.virtual_memory()._replace(total=9000, available=7000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    most, used, files, root = names

    def limit(path, n, n_used, n_files):
        stat = f"anon 5\n{files} {n_files}"
        group(f"{root}/{path}".strip("/"), **{most: n, used: n_used, "memory.stat": stat})

    assert (granted.total_memory(), granted.free_memory()) == (9000, 7000)
    limit("a/b", "max" if root == "" else 1 << 62, 10, 0)
    assert (granted.total_memory(), granted.free_memory()) == (9000, 7000)
    limit("a", 4000, 3500, 1500)  # the files' pages are taken back where memory is short
    assert (granted.total_memory(), granted.free_memory()) == (4000, 2000)
    limit("a/b", 3000, 3100, 0)
    assert (granted.total_memory(), granted.free_memory()) == (3000, 0)


@pytest.mark.parametrize(
    ("path", "files", "wanted"),
    [
        ("", {"cpu__max": "max 100000"}, float("inf")),
        ("a/b", {"cpu__max": "150000 100000"}, 1.5),
        ("a", {"cpu__max": "50000 100000"}, 0.5),
        ("cpu/a", {"cpu__cfs_quota_us": 50000, "cpu__cfs_period_us": 100000}, 0.5),
        ("cpu/a/b", {"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}, float("inf")),
    ],
)
def test_a_container_s_share_of_the_cores(group, path, files, wanted):
    group(path, **files)
    assert granted.cores() == wanted


def test_a_system_without_control_groups_grants_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(granted, "_OWN_GROUPS", tmp_path / "none")
    assert granted.total_memory() == psutil.virtual_memory().total
    assert granted.cores() == float("inf") and granted.free_memory() > 0
