"""data/cached_fineweb10B.py: the real hub client, and a local server that serves, cuts, lies, throttles and refuses."""
import hashlib
import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

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


def under_way(tmp_path):
    """Files that have begun to arrive, under names of the client's (which writes them in blocks of 10 MB)."""
    return list((tmp_path / "out" / ".partial").rglob("*.incomplete"))


def test_killed_while_half_done_then_run_again(tmp_path, hub):        # case 9a
    hub.plan[NAMES[1]] = ["hang"]
    process = subprocess.Popen(command(tmp_path), env=environment(tmp_path, hub.url), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    out = tmp_path / "out"
    deadline = time.monotonic() + 30
    while not (under_way(tmp_path) and (out / (NAMES[0] + ".json")).exists()
               and (out / (NAMES[2] + ".json")).exists()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    busy = one_line_error(run(tmp_path, hub), 1)
    assert "another download is writing into this folder" in busy and busy.count("\n") == 1
    process.kill()
    process.wait()
    assert not (out / NAMES[1]).exists()                    # nothing under the final name
    hub.stuck.set()
    hub.log.clear()
    again = run(tmp_path, hub)
    assert again.returncode == 0, again.stderr
    assert all_there(tmp_path)
    assert [entry[1:] for entry in hub.log if entry[0] == "GET"] == [(NAMES[1], None)]      # only that one


@pytest.mark.parametrize("plan, said", [
    (["cut", "cut"], "Trying to resume download"),                              # 9b, by the client
    (["short"], "1000000"),                                                     # 9c
    (["429", "429"], "HTTP Error 429"),                                         # 9d, by the client
    (["503", "503"], "answers 503; again in"),
    (["lie"], "sha256 is"),
    (["cut", "no-range"], "Trying to resume download"),
])
def test_trouble_on_the_way(tmp_path, hub, plan, said):
    hub.plan[NAMES[1]] = list(plan)
    result = run(tmp_path, hub)
    assert result.returncode == 0, result.stderr
    assert all_there(tmp_path)
    assert said in result.stderr
    assert not hub.plan[NAMES[1]]                           # every trick was played


def test_a_wait_that_the_hub_asks_for_is_kept_if_it_is_short(tmp_path, hub):
    hub.head_plan[NAMES[0]] = ["429"]
    hub.retry_after = "3"
    start = time.monotonic()
    result = run(tmp_path, hub)
    assert result.returncode == 0 and "answers 429; again in 3 s" in result.stderr, result.stderr
    assert time.monotonic() - start > 3
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    hub.head_plan[NAMES[0]] = ["429"]
    hub.retry_after = "3600"
    error = one_line_error(run(tmp_path, hub), 1)
    assert f"{NAMES[0]}: given up (the hub answers 429, and asks to wait 3,600 s); run again later" in error


def tries(monkeypatch, *outcomes):
    """(what retry gives or its error's text, seconds waited) where action() fails with these in turn, then works."""
    import hub
    left, waited = list(outcomes), []
    monkeypatch.setattr(hub.time, "sleep", waited.append)

    def action():
        if not left:
            return "there"
        raise left.pop(0)
    try:
        return hub.retry("x.bin", action), waited
    except hub.HubError as error:
        return str(error), waited


def answer(status, **headers):
    from huggingface_hub.errors import HTTPError
    error, headers = HTTPError("no"), {key.replace("_", "-"): value for key, value in headers.items()}
    error.response = SimpleNamespace(status_code=status, headers=headers)
    return error


def test_trouble_is_tried_again_five_times_and_lies_twice(monkeypatch):
    import hub
    assert tries(monkeypatch, *[TimeoutError("slow")] * 5) == ("there", [1, 2, 4, 8, 16])
    text, waited = tries(monkeypatch, *[TimeoutError("slow")] * 6)
    assert "x.bin: given up (connection lost" in text and len(waited) == 5
    assert tries(monkeypatch, *[hub.Damaged("cut")] * 2) == ("there", [1, 2])
    assert tries(monkeypatch, *[hub.Damaged("cut")] * 3) == ("x.bin: cut, 3 times: not kept", [1, 2])


@pytest.mark.parametrize("status, again, hint", [
    (408, True, False), (429, True, False), (500, True, False), (503, True, False), (400, False, False),
    (401, False, True), (403, False, True), (404, False, False), (499, False, False)])
def test_only_what_may_pass_is_tried_again(monkeypatch, status, again, hint):
    found, waited = tries(monkeypatch, answer(status))
    assert (found == "there") == again and waited == [1] * again
    assert again or f"the hub answers {status}" in found and ("; set HF_TOKEN" in found) == hint


@pytest.mark.parametrize("asked, waited", [("3", [3]), ("0", [1]), ("300", [300]), ("301", []), ("soon", [1])])
def test_the_hub_may_ask_for_five_minutes(monkeypatch, asked, waited):
    found, seconds = tries(monkeypatch, answer(429, Retry_After=asked))
    assert seconds == waited and (found == "there" if waited else "asks to wait 301 s" in found)


def test_files_from_elsewhere_are_taken_only_for_what_the_hub_has(tmp_path, monkeypatch):
    import hub
    path, remote = tmp_path / "x.bin", hub.Remote("a/b", "x.bin", "x.bin")
    path.write_bytes(b"abc")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    for size, digest, same in ((3, sha256, True), (4, sha256, False), (3, "0" * 64, False), (3, None, False)):
        assert hub.matches(path, hub.Facts(size, "e", "c", digest)) is same
    hub.remember(path, remote, hub.Facts(3, "e", "c", None))
    assert hub.is_whole(path, remote)
    for other in (hub.Remote("a/c", "x.bin", "x.bin"), hub.Remote("a/b", "y.bin", "x.bin")):
        assert not hub.is_whole(path, other)
    path.write_bytes(b"abcd")
    assert not hub.is_whole(path, remote)


def test_too_little_room_and_what_is_missing_are_said(tmp_path, monkeypatch, capsys):
    import hub
    remotes, free = [hub.Remote("a/b", f"{i}.bin", f"{i}.bin") for i in range(4)], [119]

    def facts_of(remote):
        if remote.name == "0.bin":
            raise hub.HubError("0.bin: the hub answers 404")
        return hub.Facts(40, "e", "c", None)

    def fetch(remote, facts, folder, check):
        if remote.name == "1.bin":
            raise hub.HubError("1.bin: given up")
    stand_ins = dict(connect=lambda name: None, is_offline=lambda: False, facts_of=facts_of, fetch=fetch)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(hub, name, stand_in)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    with pytest.raises(hub.HubError, match="0.0 GB to fetch, 0.0 GB free; ask for fewer files or make room"):
        hub.fetch_all(remotes, tmp_path)
    free[0] = 120
    assert hub.fetch_all(remotes, tmp_path) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 3 and said.count(".bin: 40 bytes, size as the hub says (2 of 3)") == 1


def test_throttled_question(tmp_path, hub):
    hub.head_plan[NAMES[0]] = ["429", "503"]
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
    assert not (out / ".partial").exists()


def test_file_that_is_no_shard_or_not_there(tmp_path, hub):
    hub.files[NAMES[1]] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    del hub.files[NAMES[2]]
    error = one_line_error(run(tmp_path, hub), 1)
    assert "pointer text" in error and f"{NAMES[2]}: the hub answers 404" in error
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == [NAMES[0], NAMES[0] + ".json"]


@pytest.mark.parametrize("listens", [False, True])
def test_no_network_is_said_within_seconds_and_in_one_short_line(tmp_path, listens):
    """Nobody there, and somebody who takes the connection and never answers (as some firewalls do)."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if listens:
            closed.listen()
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        start = time.monotonic()
        error = one_line_error(run(tmp_path, url), 1)
    assert time.monotonic() - start < 12
    assert error.count("\n") == 1 and error.startswith(f"error: {NAMES[0]}: no connection to {url} (")
    assert "HF_ENDPOINT" in error and len(error) < 250


def test_offline_mode_and_cache(tmp_path, hub):
    error = one_line_error(run(tmp_path, hub, 1, HF_HUB_OFFLINE="1"), 1)
    assert "HF_HUB_OFFLINE" in error and hub.log == [] and "2 of 2 files are missing" in error
    (tmp_path / "out" / NAMES[0]).write_bytes(FILES[NAMES[0]][:-1])
    error = one_line_error(run(tmp_path, hub, 1, HF_HUB_OFFLINE="1"), 1)
    assert f"{NAMES[0]}: the hub's own file is no good: it" in error and "2 of 2 files are missing" in error
    (tmp_path / "out" / NAMES[0]).unlink()
    from_cache = ("from huggingface_hub import hf_hub_download as get\n"
                  f"for name in {NAMES!r}: get({REPO!r}, name, repo_type='dataset')")
    subprocess.run([sys.executable, "-c", from_cache], env=environment(tmp_path, hub.url), check=True,
                   capture_output=True)
    hub.log.clear()
    result = run(tmp_path, hub)
    assert result.returncode == 0 and all_there(tmp_path), result.stderr
    assert not [entry for entry in hub.log if entry[0] == "GET"]
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    offline = run(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0 and "without a checksum" in offline.stdout
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in FILES.items())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])       # whoever started the tests may ignore SIGINT
def test_ctrl_c_is_quiet(tmp_path, hub, number):
    hub.plan[NAMES[1]] = ["hang"]
    process = subprocess.Popen(command(tmp_path), env=environment(tmp_path, hub.url), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    deadline = time.monotonic() + 30
    while not under_way(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(number)
    start = time.monotonic()
    _, error = process.communicate(timeout=20)
    assert time.monotonic() - start < 3
    assert process.returncode == 130
    assert error.endswith("stopped; run again to get what is missing\n") and "Traceback" not in error
    assert not (tmp_path / "out" / NAMES[1]).exists()


@pytest.mark.parametrize("argument", ["0", "104", "-1", "nine", "\u00b2"])
def test_bad_count(tmp_path, argument):
    result = subprocess.run([sys.executable, str(DATA / "cached_fineweb10B.py"), "--", argument], capture_output=True,
                            text=True, timeout=30)
    assert result.returncode == 2 and "1 to 103" in result.stderr and "Traceback" not in result.stderr


def test_without_options_nine_shards_are_fetched_four_at_a_time(capsys):
    import cached_fineweb10B as download
    args = download.parse([])
    assert (args.count, args.jobs, args.out.name) == (9, 4, "fineweb10B")
    assert download.parse(["103", "--jobs=32"]).jobs == 32 and len(download.remotes(103)) == 104
    for wrong in ("33", "0", "x"):
        with pytest.raises(SystemExit):
            download.parse([f"--jobs={wrong}"])
        assert "expected 1 to 32" in capsys.readouterr().err


def test_a_proxy_is_asked_instead(tmp_path, hub):
    """A proxy that refuses is named in the error of a hub that would answer."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{closed.getsockname()[1]}"
        error = one_line_error(run(tmp_path, "http://hub.example", http_proxy=proxy), 1)
    assert "no connection to http://hub.example" in error and error.count("\n") == 1
    assert run(tmp_path, hub, http_proxy=proxy, no_proxy="127.0.0.1").returncode == 0


def test_a_full_disk_is_one_line(tmp_path, hub):
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *command(tmp_path)]
    result = subprocess.run(limited, env=environment(tmp_path, hub.url), capture_output=True, text=True, timeout=60)
    error = one_line_error(result, 1)
    assert "File too large" in error and "3 of 3 files are missing" in error
    assert not list((tmp_path / "out").glob("*.bin"))
