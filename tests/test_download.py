"""data/cached_fineweb10B.py: the real hub client, and a local server that serves, cuts, lies, throttles and refuses."""
import hashlib
import json
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from hub_server import COMMIT, Hub, environment
from shard_helpers import DATA, raw_shard

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

REPO = "kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]


def content(seed, tokens=999_488):          # 2 MB with the header
    return raw_shard(np.random.default_rng(seed).integers(0, 50257, tokens))


FILES = {name: content(index) for index, name in enumerate(NAMES)}


@pytest.fixture
def hub():
    server = Hub(REPO, FILES)
    yield server
    server.close()


def command(tmp_path, count=2):
    return [sys.executable, str(DATA / "cached_fineweb10B.py"), str(count), f"--out={tmp_path / 'out'}"]


def run(tmp_path, hub, count=2, **more):
    url = hub if isinstance(hub, str) else hub.url
    return subprocess.run(command(tmp_path, count), env=environment(tmp_path, url, **more), capture_output=True,
                          text=True, timeout=60)


def all_there(tmp_path):
    """All three files are byte for byte the originals, with their metadata, and nothing else lies in the folder."""
    out = tmp_path / "out"
    assert sorted(x.name for x in out.iterdir()) == sorted([*NAMES, *(name + ".json" for name in NAMES)])
    for name, data in FILES.items():
        assert (out / name).read_bytes() == data, name
        stored = json.loads((out / (name + ".json")).read_text())
        assert stored["sha256"] == hashlib.sha256(data).hexdigest() and stored["size"] == len(data)
        assert stored["repo"] == REPO and stored["commit"] == COMMIT
    return True


def one_line_error(result, code):
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    return result.stderr


def test_serves_and_does_not_fetch_twice(tmp_path, hub):
    first = run(tmp_path, hub)
    assert first.returncode == 0, first.stderr
    assert all_there(tmp_path)
    assert not (tmp_path / "hf" / "hub").exists()           # no second copy in the cache
    hub.log.clear()
    second = run(tmp_path, hub)
    assert second.returncode == 0 and "3 of 3 files are whole already" in second.stdout
    assert hub.log == []                                    # not even a question
    out = tmp_path / "out"
    for file in out.glob("*.json"):
        file.unlink()                                       # files from elsewhere: known by their content
    third = run(tmp_path, hub)
    assert third.returncode == 0 and all_there(tmp_path)
    assert not [entry for entry in hub.log if entry[0] == "GET"]


def test_killed_while_half_done_then_resumed(tmp_path, hub):        # case 9a
    hub.plan[NAMES[1]] = ["hang"]
    process = subprocess.Popen(command(tmp_path), env=environment(tmp_path, hub.url), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    out = tmp_path / "out"
    half = len(FILES[NAMES[1]]) // 2

    def parts():
        return [x for x in out.glob(NAMES[1] + ".*.part") if x.stat().st_size >= half - (1 << 18)]

    deadline = time.monotonic() + 30
    while not (out.is_dir() and parts() and (out / (NAMES[0] + ".json")).exists()
               and (out / (NAMES[2] + ".json")).exists()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (out / NAMES[1]).exists()                    # nothing under the final name
    held = parts()[0].stat().st_size
    hub.stuck.set()
    hub.log.clear()
    again = run(tmp_path, hub)
    assert again.returncode == 0, again.stderr
    assert all_there(tmp_path)
    assert [entry[1:] for entry in hub.log if entry[0] == "GET"] == [(NAMES[1], f"bytes={held}-")]


@pytest.mark.parametrize("plan, said", [
    (["cut", "cut"], "connection lost"),                                        # 9b
    (["short"], "1,000,000 of 2,000,000 bytes came"),                           # 9c
    (["429", "429"], "answers 429; again in 1.0 s"),                            # 9d
    (["503", "503"], "answers 503"),
    (["lie"], "sha256 is"),
    (["cut", "no-range"], "connection lost"),
])
def test_trouble_on_the_way(tmp_path, hub, plan, said):
    hub.plan[NAMES[1]] = list(plan)
    start = time.monotonic()
    result = run(tmp_path, hub)
    assert result.returncode == 0, result.stderr
    assert all_there(tmp_path)
    assert result.stderr.count(said) == (1 if "no-range" in plan else len(plan))
    if plan[0] == "429":
        assert time.monotonic() - start > 2.0               # both waits were kept
    if "no-range" in plan:                                  # the whole file came where its rest was asked for
        assert len(hub.gets(NAMES[1])) == 2
    if plan == ["cut", "cut"]:                              # resumed, not begun again
        assert [entry[2] for entry in hub.gets(NAMES[1])][1:] == ["bytes=1000000-", "bytes=1500000-"]


def test_throttled_question(tmp_path, hub):
    hub.head_plan[NAMES[0]] = ["429-head", "503"]
    result = run(tmp_path, hub)
    assert result.returncode == 0 and all_there(tmp_path)


def test_bytes_at_another_host(tmp_path, hub):
    hub.elsewhere = True
    hub.plan[NAMES[1]] = ["cut"]
    result = run(tmp_path, hub, HF_TOKEN="hf_secret")
    assert result.returncode == 0 and all_there(tmp_path), result.stderr
    assert len(hub.tokens_elsewhere) == 4 and set(hub.tokens_elsewhere) == {None}       # credentials stay at the hub


def test_file_one_byte_short(tmp_path, hub):                # 9e
    out = tmp_path / "out"
    out.mkdir()
    (out / NAMES[1]).write_bytes(FILES[NAMES[1]][:-1])
    (out / NAMES[2]).write_bytes(FILES[NAMES[2]])
    result = run(tmp_path, hub)
    assert result.returncode == 0 and all_there(tmp_path)
    assert hub.gets(NAMES[1]) and not hub.gets(NAMES[2])


def test_a_changed_file_is_fetched_again(tmp_path, hub):
    assert run(tmp_path, hub, 1).returncode == 0
    path = tmp_path / "out" / NAMES[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    hub.log.clear()
    result = run(tmp_path, hub, 1)
    assert result.returncode == 0 and path.read_bytes() == FILES[NAMES[1]]
    assert len(hub.gets(NAMES[1])) == 1 and not hub.gets(NAMES[0])


def test_always_lying_hub_is_refused(tmp_path, hub):
    hub.plan[NAMES[1]] = ["lie"] * 10
    error = one_line_error(run(tmp_path, hub), 1)
    assert f"{NAMES[1]}: sha256 is" in error and "1 of 3 files are missing" in error
    out = tmp_path / "out"
    assert not (out / NAMES[1]).exists() and (out / NAMES[0]).exists() and (out / NAMES[2]).exists()
    assert not list(out.glob("*.part"))


def test_file_that_is_no_shard_or_not_there(tmp_path, hub):
    hub.files[NAMES[1]] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    del hub.files[NAMES[2]]
    error = one_line_error(run(tmp_path, hub), 1)
    assert "pointer text" in error and f"{NAMES[2]}: the hub answers 404" in error
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == [NAMES[0], NAMES[0] + ".json"]


def test_no_network_is_said_within_seconds(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"     # bound, not listening: refuses
        start = time.monotonic()
        error = one_line_error(run(tmp_path, url), 1)
    assert time.monotonic() - start < 8
    assert error.count("\n") == 1 and error.startswith("error: no connection to " + url) and "HF_ENDPOINT" in error


def test_offline_mode_and_cache(tmp_path, hub):
    error = one_line_error(run(tmp_path, hub, 1, HF_HUB_OFFLINE="1"), 1)
    assert "HF_HUB_OFFLINE" in error and hub.log == []
    from_cache = ("from huggingface_hub import hf_hub_download as get\n"
                  f"for name in {NAMES!r}: get({REPO!r}, name, repo_type='dataset')")
    subprocess.run([sys.executable, "-c", from_cache], env=environment(tmp_path, hub.url), check=True,
                   capture_output=True)
    hub.log.clear()
    result = run(tmp_path, hub)
    assert result.returncode == 0 and all_there(tmp_path), result.stderr
    assert not [entry for entry in hub.log if entry[0] == "GET"]
    assert (tmp_path / "out" / NAMES[0]).stat().st_nlink == 2           # linked: the disk holds it once
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    offline = run(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and "without a checksum" in offline.stdout
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in FILES.items())


def test_ctrl_c_is_quiet(tmp_path, hub):
    hub.plan[NAMES[1]] = ["hang"]
    process = subprocess.Popen(command(tmp_path), env=environment(tmp_path, hub.url), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "out").glob(NAMES[1] + ".*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, error = process.communicate(timeout=20)
    assert time.monotonic() - start < 3
    assert process.returncode == 130
    assert error == "stopped; run again to go on where it was\n"
    assert not (tmp_path / "out" / NAMES[1]).exists()


@pytest.mark.parametrize("argument", ["0", "104", "-1", "nine", "\u00b2"])
def test_bad_count(tmp_path, argument):
    result = subprocess.run([sys.executable, str(DATA / "cached_fineweb10B.py"), "--", argument], capture_output=True,
                            text=True, timeout=30)
    assert result.returncode == 2 and "1 to 103" in result.stderr and "Traceback" not in result.stderr


def test_silent_network_is_given_up(monkeypatch):
    """A firewall that swallows everything, and a name lookup that never ends."""
    import hub as hub_module

    def swallow(*args, **options):
        time.sleep(1)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", swallow)
    monkeypatch.setattr(hub_module, "PROBE_SECONDS", 0.1)
    for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    start = time.monotonic()
    with pytest.raises(hub_module.HubError, match="no connection to https://hub.example .no answer within"):
        hub_module.probe("https://hub.example")
    assert time.monotonic() - start < 2


def test_a_proxy_is_asked_instead(monkeypatch):
    import hub as hub_module
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or socket.socket())
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    hub_module.probe("https://hub.example")
    monkeypatch.setenv("no_proxy", "hub.example")
    hub_module.probe("https://hub.example")
    assert asked == [("proxy.example", 3128), ("hub.example", 443)]
