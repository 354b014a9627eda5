"""The records tools: parser, checker (a test for each refusal), compare, plot, replay, seeds. No GPU, no training."""

import fcntl
import hashlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from log_helpers import FENCE, RULE, SOURCE, VAL_PRINT, header_for, log_text, write_log

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
pytest.importorskip("scipy")
from records import check, compare, plot, replay, seeds  # noqa: E402
from records.logs import HARMLESS_OVERRIDES, LogError, logs_in, parse_log, rooms_of  # noqa: E402

BASE_SOURCE = SOURCE + "BASELINE = True\n"
RECORD_LOSSES = {seed: 3.474 + 0.0004 * (seed - 9) for seed in range(10, 16)}


def give_readme(folder: Path, **changes) -> None:
    """Write README.md with the claim that the logs carry; `changes` replace values, None drops the line."""
    text = check.draft_claim(folder).replace(check.UNNAMED, "stand-in corpus")
    for key, value in changes.items():
        is_number = re.fullmatch(r"nan|[-+.e\d]+", str(value))
        line = "" if value is None else f"{key} = {value if is_number else json.dumps(value)}\n"
        text, count = re.subn(rf"^{key} = .*\n", line, text, flags=re.MULTILINE)
        text = text if count else text.replace("```claim\n", f"```claim\n{line}")
    (folder / "README.md").write_text(f"# A title\n\n{text}\n", encoding="utf-8")


def make_record(folder: Path, readme=True, baseline=None, **all_logs) -> Path:
    """A record folder that the checker accepts: 6 seeds and a slower baseline."""
    for seed, loss in RECORD_LOSSES.items():
        write_log(folder, seed, val_loss=loss, step_ms=900, **all_logs)
        write_log(folder / "baseline", seed, **(dict(
            val_loss=loss, step_ms=950, source=BASE_SOURCE, header=dict(run_id=f"base-{seed}")) | (baseline or {})))
    if readme:
        give_readme(folder)
    return folder


def refusals(folder: Path) -> list[str]:
    found = check.check_folder(folder).refusals
    assert all(line and "\n" not in line for line in found)
    return found


def test_a_good_record_is_accepted_and_recomputed(tmp_path):
    report = check.check_folder(make_record(tmp_path / "2027-01-31_Good"))
    assert report.refusals == [] and report.kind == "record"
    text = "\n".join(report.lines)
    assert "n 6" in text and "mean 3.4754" in text and "Fieller" in text
    assert report.row.startswith("| 2027-01-31 | [Good](2027-01-31_Good/) | record | 1 x NVIDIA H100 80GB HBM3 |")
    assert report.row.count("|") == check.TABLE_HEAD.splitlines()[0].count("|")


# ---------------------------------------------------------------------------------------------- the parser

def test_parse_reads_every_part(tmp_path):
    log = parse_log(write_log(tmp_path, 3, slow={11: 2000.0}))
    assert log.source == SOURCE.encode() and log.sha_matches and log.finished and not log.resumed
    assert [point.step for point in log.validation] == [0, 10, 20, 30, 40]
    assert math.isnan(log.validation[0].fields["step_avg"]) and log.training[0].fields["tokens_per_s"] == 551882
    assert len(log.step_times_ms) == 40 and log.tokens_at(10) == 10 * 524288 and "NVIDIA-SMI" in log.nvidia_smi
    assert [(slow.step, slow.why) for slow in log.slow_steps] == [(11, "after validation")]
    before, after = log.validation[1], log.validation[2]
    middle = log.seconds_to((before.loss + after.loss) / 2)
    assert middle == pytest.approx((before.seconds + after.seconds) / 2) and log.seconds_to(1.0) is None
    assert log.hardware == "1 x NVIDIA H100 80GB HBM3" and log.notes == ("note: predicted total time 280 s",)


def test_tokens_are_spread_when_the_batch_changes(tmp_path):
    log = parse_log(write_log(tmp_path, result=dict(tokens_trained=1000)))
    assert log.tokens_at(10) == 250


def test_tokens_between_two_logged_steps_lie_on_their_line(tmp_path):
    """Stages of 100 and then 300 tokens a step, of which the training lines of steps 10 and 20 tell."""
    path = write_log(tmp_path, result=dict(tokens_trained=8000), val_every=5)
    for step in (10, 20):
        path.write_text(re.sub(rf"(step:{step}/40 train_loss.*)", rf"\1 tokens:{100 * step}", path.read_text()))
    whole, cut = parse_log(path), tmp_path / "cut.txt"
    assert [whole.tokens_at(step) for step in (0, 5, 10, 15, 20, 25, 30, 40)] == [
        0, 500, 1000, 1500, 2000, 3500, 5000, 8000]
    cut.write_text(path.read_text().partition("step_times_ms")[0])
    assert parse_log(cut).tokens_at(25) == 2500                                # the run goes on as it did
    assert parse_log(write_log(tmp_path / "none", result=dict(tokens_trained=0))).tokens_at(3) == 3 * 524288


@pytest.mark.parametrize("source", [
    f'TEXT = """\n{FENCE}\n"""\n{SOURCE}', f'{SOURCE}"""\n{FENCE}\n{{"format": 1}}\n{FENCE}\n"""\n',
    SOURCE.replace("\n", "\r\n"), f'TEXT = """\r\n{FENCE}\r\n"""\r\n'])
def test_a_source_may_hold_fences_and_carriage_returns(tmp_path, source):
    path = tmp_path / "odd.txt"
    path.write_bytes(log_text(source=source).encode())
    log = parse_log(path)
    assert log.source == source.encode() and log.sha_matches and len(log.step_times_ms) == 40
    assert replay.main([str(path), "--write", str(tmp_path / "again.py")]) == 0
    assert (tmp_path / "again.py").read_bytes() == source.encode()
    path.write_bytes(log_text(source=source).encode().replace(b"sha256", b"sha-256", 1))
    with pytest.raises(LogError, match="header lacks source_sha256|more than one log in one file"):
        parse_log(path)


HALF_STEP = log_text()[:log_text().index("step:40/40 val_loss") + 24]


@pytest.mark.parametrize("content, words", [
    (b"", "empty"),
    (b"hello\n", "not a log of this project"),
    (SOURCE.encode() + FENCE.encode() + b"\n{}", "only the first of two fences"),
    ((log_text(1) + log_text(2)).encode(), "more than one log in one file"),
    ((log_text(1) + log_text(2).split(FENCE + "\n")[2]).encode(), "more than one run"),
    (log_text().encode().replace(b"stand-in", b"\xff\xfe"), "not UTF-8"),
    (log_text().replace('{"format": 1', '{"format": 1,,').encode(), "not a JSON header"),
    (log_text().replace('"run_id"', '"run"').encode(), "lacks run_id"),
    (log_text(header=dict(versions=None)).encode(), "header's versions is not a dict"),
    (log_text().replace('"format": 1', '"format": 7').encode(), "log format 7"),
    (log_text().replace('"fingerprint"', '"print"').encode(), "fingerprints"),
    (log_text().replace("val_loss:", "val_loss:x").encode(), "not an event this parser knows"),
    (log_text(result=dict(val_loss="3.2")).encode(), "val_loss is not a number"),
    ((FENCE + "\n" + log_text().split(FENCE + "\n", 1)[1]).encode(), "no source"),
])
def test_parse_says_in_one_line_what_is_wrong(tmp_path, content, words):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(LogError) as error:
        parse_log(path)
    assert words in str(error.value) and "odd.txt" in str(error.value) and "\n" not in str(error.value)


def test_half_a_last_line_is_not_read(tmp_path):
    path = tmp_path / "cut.txt"
    path.write_text(HALF_STEP, encoding="utf-8")
    log = parse_log(path)
    assert log.result is None and log.validation[-1].step == 30 and not log.finished


def test_rooms_are_found_by_rule_and_title():
    rooms = rooms_of(SOURCE)
    assert {key: title for key, (title, _) in rooms.items()} == {
        "": "top of file", "0": "Door", "1": "Configuration", "3": "Kernels"}
    assert "\n".join(line for _, lines in rooms.values() for line in lines) + "\n" == SOURCE
    assert "9" not in rooms_of("x = 1\n# 9. Not announced by a rule\n")


def test_harmless_overrides_agree_with_the_trainer():
    trainer = ROOT / "train_gpt.py"
    listed = re.search(r"^HARMLESS_\w+ = \(([^)]*)\)", trainer.read_text(encoding="utf-8") if trainer.exists() else "",
                       re.MULTILINE)
    if not listed:
        pytest.skip("no trainer with a list of harmless overrides here")
    assert set(re.findall(r'"(\w+)"', listed[1])) <= HARMLESS_OVERRIDES


# ---------------------------------------------------------------------------------------------- statistics

def test_statistics_against_hand_calculation():
    # t = (2 - 3) / (1 / sqrt(3)) with 2 degrees of freedom; its one-sided p in closed form.
    t = -math.sqrt(3)
    assert check.p_below([1.0, 2.0, 3.0], 3.0) == pytest.approx(0.5 * (1 + t / math.sqrt(2 + t * t)))
    assert math.isnan(check.p_below([3.0], 4.0)) and math.isnan(check.p_below([3.0, 3.0], 4.0))
    delta, low, high = check.difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    half = 2.7764451 * math.sqrt(2 / 3)      # t quantile with 4 degrees of freedom
    assert (delta, low, high) == pytest.approx((1.0, 1 - half, 1 + half))


def test_ratio_interval_is_fiellers():
    a, b = [90.0, 92.0, 91.5, 90.5], [100.0, 103.0, 101.0]
    point, low, high = check.ratio(a, b)
    assert point == pytest.approx(91 / (304 / 3)) and low < point < high
    back = check.ratio(b, a)                 # the interval of the inverse is the inverse interval
    assert back == pytest.approx((1 / point, 1 / high, 1 / low))
    assert math.isnan(check.ratio(a, b[:1])[1])
    assert check.ratio([1.0, 2.0], [-5.0, 5.5])[2] == math.inf
    rng, inside = random.Random(0), 0
    for _ in range(400):
        low, high = check.ratio([rng.gauss(90, 2) for _ in range(6)], [rng.gauss(100, 5) for _ in range(4)])[1:]
        inside += low <= 0.9 <= high
    assert 0.92 < inside / 400 < 0.98


def test_statistics_of_sides_of_unequal_size_and_spread_are_welchs_and_fiellers():
    from scipy import stats
    a, b = [90.0, 92.0, 91.5, 90.5], [100.0, 113.0, 101.0]

    def freedom(scale):
        """Welch and Satterthwaite's, of a and scale times b."""
        parts = [check.deviation(side) ** 2 / len(side) * factor ** 2 for side, factor in ((a, 1), (b, scale))]
        return sum(parts) ** 2 / sum(part ** 2 / (len(side) - 1) for part, side in zip(parts, (a, b)))
    spread = [check.deviation(side) / math.sqrt(len(side)) for side in (a, b)]
    t = (check.mean(a) - check.mean(b)) / math.hypot(*spread)
    assert check.p_less(a, b) == pytest.approx(stats.t.cdf(t, freedom(1)))
    half = stats.t.ppf(0.975, freedom(1)) * math.hypot(*spread)
    assert check.difference(a, b)[1:] == pytest.approx(tuple(check.mean(b) - check.mean(a) + x for x in (-half, half)))
    point, low, high = check.ratio(a, b)
    quantile = stats.t.ppf(0.975, freedom(point))
    for edge in (low, high):                # both edges are as far from the means as the quantile allows
        distance = abs(check.mean(a) - edge * check.mean(b)) / math.hypot(spread[0], edge * spread[1])
        assert distance == pytest.approx(quantile)


def test_ratio_interval_when_one_side_has_no_spread():
    a, same = [90.0, 92.0, 91.5, 90.5], [100.0, 100.0, 100.0]
    half = 3.1824463 * check.deviation(a) / 2 / 100      # t quantile with 3 degrees of freedom
    assert check.ratio(a, same) == pytest.approx((0.91, 0.91 - half, 0.91 + half))
    assert check.ratio([50.0] * 2, same) == (0.5, 0.5, 0.5)


# ---------------------------------------------------------------------------------------------- refusals: logs

@pytest.mark.parametrize("change, words", [
    (dict(header=dict(source_sha256="0" * 64)), "its header says 000000000000"),
    (dict(header=dict(resumed_from="checkpoints/x.pt")), "resumed"),
    (dict(result=dict(resumed=True)), "resumed"),
    (dict(header=dict(overrides=dict(seed=10, num_steps=40))), "--num_steps=40"),
    (dict(result=dict(val_loss=math.nan)), "not finite"),
    (dict(result=dict(status="non_finite")), "not finite"),
    (dict(result=dict(status="stopped", step=30)), "incomplete (stopped at step 30/40)"),
    (dict(result=dict(status="finished", step=30)), "incomplete (finished at step 30/40)"),
    (dict(result=dict(status="target_reached", step=30)), "chosen by looking"),
    (dict(result=dict(val_loss=3.40)), "result says val_loss 3.4000"),
    (dict(result=dict(val_loss=3.4742)), "result says val_loss 3.4742"),
    (dict(result=dict(train_time_ms=30000.0)), "result says 30.000 s"),
    (dict(result=dict(train_time_ms=0)), "its training time is 0.0 s"),
    (dict(result=dict(val_tokens=1000)), "validated on 1000 tokens"),
    (dict(result=dict(val_tokens=2097153)), "validated on 2097153 tokens"),
    (dict(header=dict(source_sha256=hashlib.sha256((SOURCE + "#").encode()).hexdigest()), source=SOURCE + "#\n"),
     "the embedded source has sha256"),
    (dict(source=SOURCE + "# one run of another script\n"), "mixed sources in the runs"),
    (dict(header=dict(config_lr_matrix=0.9)), "runs differ in lr_matrix"),
    (dict(header=dict(seed=11)), "seed 11 counts 2 times"),
    (dict(header=dict(run_id="run-11")), "one run counted twice: run-10.txt and run-11.txt have the same run_id"),
    (dict(header=dict(world_size=8)), "different hardware between the runs"),
])
def test_refused_for_one_of_its_logs(tmp_path, change, words):
    folder = make_record(tmp_path / "record")
    write_log(folder, 10, **(dict(val_loss=RECORD_LOSSES[10], step_ms=900) | change))
    found = refusals(folder)
    assert any(words in line for line in found), found


def edit_log(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("places, words", [
    (("result", "val"), "the result's train_time says 30.000 s, its step times add up to 37."),
    (("result",), "result says 30.000 s, its last validation line 37."),
    (("train",), "the training line of step 40 says 30.000 s"),
    (("early val",), "the validation line of step 20 says 30.000 s"),
    (("average",), "the result's step_avg times its steps says 30.000 s"),
    (("times",), "the result's train_time says 37."),
    (("one time",), "it holds 39 step times for 40 steps"),
    (("one more",), "it holds 41 step times for 40 steps"),
    (("first val",), "the validation line of step 0 says 0.003 s, its step times add up to 0.000 s"),
    (("result by 5 ms",), "its last validation line"),
    (("two steps late",), "the training line of step 20 says"),
])
def test_refused_when_a_time_is_edited_in_some_places(tmp_path, places, words):
    folder = make_record(tmp_path / "record")
    text = (folder / "run-10.txt").read_text(encoding="utf-8")
    edits = {"result": (r'("train_time_ms": )[\d.]+', r"\g<1>30000.0"),
             "average": (r'(step_avg_ms": )[\d.]+', r"\g<1>750"),
             "val": (r"(40/40 val_loss:\S+ train_time:)\d+", r"\g<1>30000"),
             "early val": (r"(20/40 val_loss:\S+ train_time:)\d+", r"\g<1>30000"),
             "train": (r"(40/40 train_loss:\S+ train_time:)\d+", r"\g<1>30000"),
             "times": (r"(step_times_ms:\[)[\d.]+", r"\g<1>1000.0"), "one time": (r"(step_times_ms:\[)[\d.]+, ", r"\1"),
             "one more": (r"(step_times_ms:\[)", r"\g<1>0.0, "),
             "first val": (r"(0/40 val_loss:\S+ train_time:)0ms", r"\g<1>3ms"),
             "result by 5 ms": (r'(train_time_ms": )([\d.]+)', lambda m: f"{m[1]}{float(m[2]) + 5}"),
             "two steps late": (r"(step:20/40 train_loss:\S+ train_time:)(\d+)", lambda m: f"{m[1]}{int(m[2]) + 2000}")}
    for place in places:
        text, count = re.subn(*edits[place], text)
        assert count == 1
    (folder / "run-10.txt").write_text(text, encoding="utf-8")
    found = refusals(folder)
    assert any(words in line for line in found), found


def test_times_may_round_but_not_by_a_thousandth(tmp_path):
    log = parse_log(write_log(tmp_path, 1))
    total_ms = sum(log.step_times_ms)
    for share, words in ((0.0009, []), (0.0012, ["the result's train_time"]), (-0.0012, ["the result's train_time"])):
        ms = total_ms * (1 + share)
        text = log_text(1, result=dict(train_time_ms=ms)).replace(
            f"train_time:{total_ms:.0f}ms step_avg:{total_ms / 40:.2f}ms\n", f"train_time:{ms:.0f}ms step_avg:1ms\n")
        (tmp_path / "run-1.txt").write_text(text, encoding="utf-8")
        found = check.log_refusals(parse_log(tmp_path / "run-1.txt"), "run")
        assert len(found) == len(words) and all(word in line for word, line in zip(words, found)), found


def test_refused_same_events_under_another_name(tmp_path):
    folder = make_record(tmp_path / "record")
    text = (folder / "run-10.txt").read_text(encoding="utf-8")
    text = text.replace('"run-10"', '"run-16"').replace('"seed": 10', '"seed": 16')
    (folder / "run-16.txt").write_text(text, encoding="utf-8")
    give_readme(folder)
    assert refusals(folder) == [
        "one run counted twice: run-10.txt and run-16.txt have the same step lines and times"]


def test_refused_run_that_is_also_its_baseline(tmp_path):
    folder = make_record(tmp_path / "record")
    (folder / "baseline" / "run-10.txt").write_bytes((folder / "run-10.txt").read_bytes())
    assert any("one run counted twice" in line for line in refusals(folder))


def test_refused_log_without_result(tmp_path):
    folder = make_record(tmp_path / "record")
    path = folder / "run-10.txt"
    path.write_text(path.read_text(encoding="utf-8").split("result:")[0], encoding="utf-8")
    assert any("no result line" in line for line in refusals(folder))


def test_logs_without_a_step_are_not_taken_for_one_run(tmp_path):
    for seed in (1, 2):
        path = write_log(tmp_path, seed)
        head = path.read_text(encoding="utf-8").rpartition(FENCE + "\n")[0]
        path.write_text(head + FENCE + "\nnote: killed at once\n", encoding="utf-8")
    assert check.twice_refusals(logs_in(tmp_path)[0]) == []


def test_refused_log_with_a_loss_that_is_not_finite_on_the_way(tmp_path):
    folder = make_record(tmp_path / "record")
    edit_log(folder / "run-10.txt", "step:20/40 train_loss:", "step:20/40 train_loss:nan x:")
    assert "run-10.txt: a loss is not finite (step 20)" in refusals(folder)


def test_refused_log_without_its_last_validation(tmp_path):
    folder = make_record(tmp_path / "record")
    edit_log(folder / "run-10.txt", "step:40/40 val_loss", "note: 40/40 val_loss")
    assert refusals(folder) == ["run-10.txt: no validation line at its last step 40"]


def test_refused_folder_without_logs(tmp_path):
    give_readme(make_record(tmp_path / "record"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "record" / "README.md").rename(tmp_path / "empty" / "README.md")
    assert refusals(tmp_path / "empty") == ["no log (*.txt) of a run"]


def test_refused_log_that_is_too_large(tmp_path):
    folder = make_record(tmp_path / "record")
    with open(folder / "run-10.txt", "a", encoding="utf-8") as file:
        file.write("note: long\n" * 30000)
    found = refusals(folder)
    assert len(found) == 1 and "more than 300,000" in found[0]


def test_a_log_may_have_300_000_bytes(tmp_path):
    path = write_log(tmp_path, 1)
    for size, found in ((300_000, 0), (300_001, 1)):
        text = path.read_text(encoding="utf-8").rstrip("x\n") + "\n"
        path.write_text(text + "x" * (size - len(text) - 1) + "\n", encoding="utf-8")
        assert path.stat().st_size == size and len(check.log_refusals(parse_log(path), "run")) == found


def test_refused_file_that_is_no_log(tmp_path):
    folder = make_record(tmp_path / "record")
    (folder / "nvidia.txt").write_text("GPU 0\n", encoding="utf-8")
    assert len(refusals(folder)) == 1 and "nvidia.txt: not a log" in refusals(folder)[0]


# ---------------------------------------------------------------------------------------------- refusals: arms

VAL_FILES = header_for()["data"]["val"]
OTHER_TRAIN = dict(files=[dict(file="x", bytes=1, tokens=100000000, fingerprint="9999")], tokens=100000000)


@pytest.mark.parametrize("change, words", [
    (dict(header=dict(data=dict(train=OTHER_TRAIN, val=VAL_FILES))),
     "different training data between runs and baseline"),
    (dict(header=dict(data=dict(train=header_for()["data"]["train"], val=OTHER_TRAIN))), "different validation data"),
    (dict(header=dict(devices=["NVIDIA H200"])), "different hardware between runs and baseline"),
    (dict(val_tokens=1000, header=dict(config_val_tokens=1000)), "different validation tokens"),
    (dict(source=SOURCE), "runs and baseline ran the same source and configuration"),
    (dict(header=dict(overrides=dict(model_dim=8))), "baseline: run-10.txt: overridden"),
    (dict(step_ms=899), "not faster than its baseline"),
])
def test_refused_for_its_baseline(tmp_path, change, words):
    folder = make_record(tmp_path / "record", readme=False)
    for seed, loss in RECORD_LOSSES.items():
        settings = dict(val_loss=loss, step_ms=950, source=BASE_SOURCE) | change
        settings["header"] = {"run_id": f"base-{seed}"} | settings.get("header", {})
        write_log(folder / "baseline", seed, **settings)
    give_readme(folder)
    found = refusals(folder)
    assert any(words in line for line in found), found


def test_refused_without_baseline(tmp_path):
    folder = make_record(tmp_path / "record")
    for path in (folder / "baseline").glob("*.txt"):
        path.unlink()
    assert any("0 logs in baseline/" in line for line in refusals(folder))
    assert any("ratio" in line and "nothing" in line for line in refusals(folder))


def test_refused_with_a_single_log_of_the_baseline(tmp_path):
    folder = make_record(tmp_path / "record")
    for seed in range(11, 16):
        (folder / "baseline" / f"run-{seed}.txt").unlink()
    assert "1 logs in baseline/: the ratio needs at least 2 from the same machine and call" in refusals(folder)


@pytest.mark.parametrize("t, sure", [(3.3, False), (3.45, True)])       # of 6 runs: p 0.0107 and 0.0091
def test_the_mean_is_below_its_target_at_one_percent(tmp_path, t, sure):
    folder, spread = make_record(tmp_path / "record", readme=False), 0.01
    for seed in range(10, 16):
        loss = 3.48 - t * spread / math.sqrt(5) + (spread if seed % 2 else -spread)
        write_log(folder, seed, val_loss=loss, step_ms=900)
    give_readme(folder)
    found = refusals(folder)
    assert found == [] if sure else len(found) == 1 and "not below the target 3.48 with p < 0.01" in found[0], found


def test_refused_with_too_few_runs(tmp_path):
    folder = make_record(tmp_path / "record")
    for seed in range(11, 16):
        (folder / f"run-{seed}.txt").unlink()
    give_readme(folder, kind="record", p=0.001)
    found = refusals(folder)
    assert any("a single run: a record needs n >= 6" in line for line in found), found
    assert any("better than the logs: p 0.001, the logs say nothing" in line for line in found)


@pytest.mark.parametrize("losses, words", [
    ([3.40, 3.55, 3.40, 3.55, 3.40, 3.55], "one-sided p is"), ([3.475] * 6, "the losses are all equal")])
def test_refused_when_the_mean_is_not_surely_below(tmp_path, losses, words):
    folder = make_record(tmp_path / "record", readme=False)
    for seed, loss in enumerate(losses, 10):
        write_log(folder, seed, val_loss=loss, step_ms=900)
    give_readme(folder, p="0.001")
    assert any("not below the target 3.48 with p < 0.01" in line and words in line for line in refusals(folder))


def test_refused_without_target_in_the_configuration(tmp_path):
    folder = make_record(tmp_path / "record", header=dict(config_target_loss=0.0), readme=False)
    give_readme(folder, target=3.48, p=0.001)
    assert any("has no target_loss" in line for line in refusals(folder))


# ---------------------------------------------------------------------------------------------- refusals: README

@pytest.mark.parametrize("change, words", [
    (dict(time_s="36.9"), "better than the logs: time_s 36.9"),
    (dict(val_loss="3.4744"), "better than the logs: val_loss 3.4744"),
    (dict(val_loss="3"), "better than the logs: val_loss 3,"),
    (dict(p="1e-9"), "better than the logs: p 1e-9"),
    (dict(p="0"), "better than the logs: p 0"),
    (dict(p="<1e-9"), "better than the logs: p <1e-9"),
    (dict(ratio="0.9"), "better than the logs: ratio 0.9"),
    (dict(n="7"), "better than the logs: n 7, the folder holds 6"),
    (dict(n="5"), "README.md says n 5, the folder holds 6"),
    (dict(time_s="nan"), "time_s is nan, not a number"),
    (dict(time_s="fast"), "time_s is fast, not a number"),
    (dict(target="3.28"), "says target 3.28"),
    (dict(target="3.58"), "says target 3.58"),
    (dict(hardware="NVIDIA H100"), "says hardware NVIDIA H100"),
    (dict(hardware="8 x NVIDIA H100 80GB HBM3"), "says hardware 8 x"),
    (dict(data="FineWeb"), f"does not name the validation fingerprint {VAL_PRINT}"),
    (dict(data=f"{check.UNNAMED}, val {VAL_PRINT}"), "name the data set"),
    (dict(kind="victory"), "kind is victory"),
    (dict(p=None), "lacks p"),
    (dict(speed="9"), "has unknown speed"),
])
def test_refused_for_its_readme(tmp_path, change, words):
    folder = make_record(tmp_path / "record")
    give_readme(folder, **change)
    found = refusals(folder)
    assert any(words in line for line in found), found


@pytest.mark.parametrize("key, claimed, measured, accepted", [
    ("val_loss", "3.475", 3.4754, True), ("val_loss", "3.475", 3.4756, False), ("time_s", "55", 55.4, True),
    ("time_s", "55", 55.6, False), ("time_s", "50", 50.6, False), ("ratio", "0.2", 0.206, False),
    ("ratio", "0.2", 0.204, True), ("p", "0.007", 0.0071, True), ("p", "0.007", 0.0074, False),
    ("val_loss", "3.4750", 3.47504, True), ("val_loss", "3.4750", 3.47506, False), ("time_s", "55.0", 55.04, True),
    ("time_s", "55.0", 55.06, False), ("ratio", "0.200", 0.2004, True), ("ratio", "0.200", 0.2006, False),
    ("p", "0.00700", 0.007004, True), ("p", "0.00700", 0.007006, False),
    ("rung_1_loss", "4", 4.001, False), ("rung_1_s", "1e2", 100.6, False), ("rung_1_s", "1e2", 100.4, True)])
def test_a_claim_may_round_by_half_a_unit_of_its_last_digit(key, claimed, measured, accepted):
    assert (check.better_than_logs(key, check.Decimal(claimed), measured) is None) == accepted


@pytest.mark.parametrize("measured, accepted", [(0.00999, True), (0.01, False), (0.0101, False), (math.nan, False)])
def test_a_bound_is_above_what_was_measured(measured, accepted):
    assert (check.better_than_logs("p", "<0.01", measured) is None) == accepted


def test_a_claim_may_round_and_may_be_modest(tmp_path):
    folder = make_record(tmp_path / "record")
    give_readme(folder, time_s="38", val_loss="3.476", p="<0.001", ratio="0.95")
    assert refusals(folder) == []


def test_refused_readme_missing_or_with_two_blocks(tmp_path):
    folder = make_record(tmp_path / "record")
    text = (folder / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(text + text, encoding="utf-8")
    assert any("has 2 blocks" in line for line in refusals(folder))
    (folder / "README.md").write_text(text.replace("n = 6", "n = 6\nn = 6"), encoding="utf-8")
    assert any("is no TOML: Cannot overwrite a value" in line for line in refusals(folder))
    (folder / "README.md").unlink()
    assert any("no readable README.md" in line for line in refusals(folder))


# ---------------------------------------------------------------------------------------------- runs and ladders

def test_a_plain_run_needs_an_honest_label(tmp_path):
    write_log(tmp_path, 4, header=dict(overrides=dict(seed=4, num_steps=40)))
    give_readme(tmp_path)
    report = check.check_folder(tmp_path)
    assert report.refusals == [] and report.kind == "run" and check.NOT_A_RECORD in report.row
    assert any("num_steps" in note for note in report.notes)
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace(check.NOT_A_RECORD, "a record"), encoding="utf-8")
    assert any("must say that it is not a record claim" in line for line in refusals(tmp_path))
    give_readme(tmp_path, p="0.001")
    assert any("better than the logs: p" in line for line in refusals(tmp_path))


def report_on_surplus(tmp_path, surplus):
    """The report on a record whose baseline ends lower by surplus, seed by seed."""
    folder = make_record(tmp_path / "record", readme=False)
    for seed, loss in RECORD_LOSSES.items():
        write_log(folder / "baseline", seed, val_loss=loss - surplus, step_ms=950, source=BASE_SOURCE,
                  header=dict(run_id=f"base-{seed}"))
    give_readme(folder)
    return check.check_folder(folder)


def test_a_surplus_of_the_baseline_is_noted(tmp_path):
    report = report_on_surplus(tmp_path, 0.01)
    assert report.refusals == []
    assert report.notes == ["the baseline's loss is lower by 0.0100: that surplus is part of the ratio"]


def test_a_surplus_that_may_be_chance_is_not_noted(tmp_path):
    report = report_on_surplus(tmp_path, 0.0005)
    assert report.refusals == [] and report.notes == []


# ---------------------------------------------------------------------------------------------- records by contract

@pytest.mark.parametrize("where", ["run-10.txt", "baseline/run-10.txt"])
@pytest.mark.parametrize("old, new, words", [
    ('"seed": 10', '"seed": 9', "seed 9: a record counts seeds from 10 on"),
    ('"overrides": {', '"overrides": {"micro_rows": 1, ', "--micro_rows=1"),
    ('"overrides": {', '"overrides": {"self_check": "off", ', "--self_check=off"),
    ('"parameters": {', '"parameter": {', "does not list the parameters"),
    ('"torch": "2.11.0"', '"torch": "2.12.0"', "its torch is 2.1"),
])
def test_refused_record_against_the_contract(tmp_path, where, old, new, words):
    folder = make_record(tmp_path / "record")
    edit_log(folder / where, old, new)
    found = refusals(folder)
    assert any(words in line for line in found), found
    assert ("baseline: " in found[0]) == ("baseline" in where) or "torch" in words


def test_a_record_may_name_paths_and_checkpoints(tmp_path):
    folder = make_record(tmp_path / "record")
    edit_log(folder / "run-10.txt", '"overrides": {', '"overrides": {"train_files": "x/*.bin", "checkpoint_dir": "y", ')
    assert refusals(folder) == []


def test_parameters_stand_beside_the_claim(tmp_path):
    folder = make_record(tmp_path / "record")
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "parameters_dense = 85000000\nparameters_tables = 39000000\n" in text
    assert "  parameters: 85,000,000 in dense matrices, 39,000,000 in tables" in check.check_folder(folder).lines
    give_readme(folder, parameters_tables="38999999")
    assert refusals(folder) == ["README.md says parameters_tables 38999999, the logs say 39000000"]
    give_readme(folder, parameters_dense=None)
    assert refusals(folder) == ["README.md: claim lacks parameters_dense"]


@pytest.mark.parametrize("order, accepted", [("ibibibibibib", True), ("ibbiibbiibbi", True), ("iiiiiibbbbbb", False),
                                             ("ibibibibbbii", False)])
def test_arms_take_turns(tmp_path, order, accepted):
    folder = make_record(tmp_path / "record", readme=False)
    seeds_left = {"i": [*RECORD_LOSSES], "b": [*RECORD_LOSSES]}
    for minute, arm in enumerate(order):
        seed = seeds_left[arm].pop()
        path = (folder if arm == "i" else folder / "baseline") / f"run-{seed}.txt"
        edit_log(path, f"2026-12-01T10:{seed:02}:00", f"2026-12-01T11:{minute:02}:00")
    give_readme(folder)
    found = refusals(folder)
    assert found == [] if accepted else "not turn by turn" in found[0], found


def make_equal_loss(folder: Path, margin: float, baseline_seeds=RECORD_LOSSES, **base) -> Path:
    """A record folder whose target is the baseline's mean; its runs end `margin` below."""
    none = dict(config_target_loss=0.0)
    for seed, loss in RECORD_LOSSES.items():
        write_log(folder, seed, val_loss=loss - margin, step_ms=500, header=none)
    for seed in baseline_seeds:
        write_log(folder / "baseline", seed, val_loss=RECORD_LOSSES[seed], source=BASE_SOURCE,
                  **(dict(step_ms=950, header=none | dict(run_id=f"base-{seed}")) | base))
    give_readme(folder)
    return folder


def test_a_record_at_equal_loss_is_accepted(tmp_path):
    folder = make_equal_loss(tmp_path / "2027-01-31_Equal", 0.003)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert 'kind = "record"' in text and 'target = "baseline"' in text
    report = check.check_folder(folder)
    assert report.refusals == [] and "| baseline | 6 |" in report.row
    assert report.row.endswith("| 0.5263 [0.5261, 0.5265] |"), report.row
    losses = [[loss - margin for loss in RECORD_LOSSES.values()] for margin in (0.003, 0.0)]
    delta, se = -0.003, math.sqrt(2 / 6) * check.deviation(losses[1])
    from scipy import stats
    assert check.p_less(*losses) == pytest.approx(stats.t.cdf(delta / se, 10))     # equal spreads: 2 n - 2


@pytest.mark.parametrize("arguments, words", [
    (dict(margin=0.0005), "mean loss is not below the mean of its baseline with p < 0.01"),
    (dict(margin=-0.003), "mean loss is not below the mean of its baseline with p < 0.01"),
    (dict(margin=0.003, baseline_seeds=(10, 11, 12, 13, 14)), "5 logs in baseline/: the target needs at least 6"),
    (dict(margin=0.003, baseline_seeds=()), "0 logs in baseline/"),
    (dict(margin=0.003, step_ms=499), "not faster than its baseline"),
])
def test_refused_record_at_equal_loss(tmp_path, arguments, words):
    folder = make_equal_loss(tmp_path / "equal", **arguments)
    give_readme(folder, kind="record", target="baseline", p="0.5", ratio="2")
    found = refusals(folder)
    assert any(words in line for line in found), found
    give_readme(folder, kind="record", target="3.48", p="0.5", ratio="2")
    assert any("has no target_loss" in line for line in refusals(folder))


@pytest.mark.parametrize("seeds, note", [
    ((1, 2, 4), ["seeds 3 are not there: say why"]), ((1, 14), [f"seeds {', '.join(map(str, range(2, 14)))} are not "
     "there: say why"]), ((1, 2, 3), []), ((1, 5000), [])])
def test_gaps_in_the_seeds_are_noted(tmp_path, seeds, note):
    for seed in seeds:
        write_log(tmp_path, seed, val_loss=3.47 + 0.0001 * seed / seeds[-1])
    give_readme(tmp_path)
    assert check.check_folder(tmp_path).notes == note


def test_warnings_and_uncommitted_changes_of_one_log_are_noted(tmp_path):
    for seed in (1, 2):
        write_log(tmp_path, seed, val_loss=3.47 + 0.001 * seed)
    edit_log(tmp_path / "run-2.txt", "note: predicted", "warn: one\nwarn: two\nwarn: three\nnote: predicted")
    edit_log(tmp_path / "run-2.txt", '"dirty": false', '"dirty": true')
    give_readme(tmp_path)
    assert check.check_folder(tmp_path).notes == [
        "the working tree had uncommitted changes (the source in the log is what ran)",
        "run-2.txt: warn: one", "run-2.txt: warn: two"]


@pytest.mark.parametrize("day, note", [("01T10:15", []), ("02T10:10", []), ("02T11:30", [
    "runs and baseline span 25 hours: was this one call on one machine?"])])
def test_arms_that_lie_more_than_a_day_apart_are_noted(tmp_path, day, note):
    folder = make_record(tmp_path / "record")
    edit_log(folder / "baseline" / "run-15.txt", "2026-12-01T10:15", f"2026-12-{day}")
    assert check.check_folder(folder).notes == note


def test_a_draft_claims_a_record_only_for_six_runs_and_the_ratio_is_that_to_the_baseline(tmp_path):
    folder = make_record(tmp_path / "record")
    assert 'kind = "record"' in (draft := check.draft_claim(folder)) and "ratio = 0.9474" in draft
    p = check.p_below(list(RECORD_LOSSES.values()), 3.48)
    assert f"p = {p:.2g}\n" in draft and "time_s = 37." in draft and "n = 6\n" in draft
    (folder / "run-10.txt").unlink()
    assert 'kind = "run"' in check.draft_claim(folder)
    equal = make_equal_loss(tmp_path / "equal", 0.003)
    losses = [[loss - margin for loss in RECORD_LOSSES.values()] for margin in (0.003, 0.0)]
    assert f"p = {check.p_less(*losses):.2g}\n" in check.draft_claim(equal)


def make_ladder(folder: Path, **last_rung) -> Path:
    for number, (title, loss) in enumerate(dict(adamw=3.9, muon=3.7, modern_parts=3.6, untied=3.5).items()):
        settings = dict(val_loss=loss, source=f"{SOURCE}RUNG = {number}\n", header={})
        settings |= last_rung if title == "untied" else {}
        settings["header"] = {"config_target_loss": 0.0} | settings["header"]
        write_log(folder, number, **settings).rename(folder / f"{number}_{title}.txt")
    give_ladder_readme(folder)
    return folder


def give_ladder_readme(folder: Path, **changes) -> None:
    rungs = [f"{key} = {value}\n" for key, value in (dict(n=4, target="3.7") | changes).items()]
    (folder / "README.md").write_text(f'''```claim
kind = "ladder"
hardware = "1 x NVIDIA H100 80GB HBM3"
data = "stand-in, val {VAL_PRINT}"
{"".join(rungs)}```''', encoding="utf-8")


def test_a_good_ladder_is_accepted(tmp_path):
    folder = make_ladder(tmp_path / "2027-01-31_Ladder")
    report = check.check_folder(folder)
    assert report.refusals == [] and "4 rungs" in report.row and "| 3.9000 > 3.5000 |" in report.row
    assert "0_adamw" in report.lines[0] and "seconds to 3.7: -," in report.lines[0]
    seconds = float(re.search(r"seconds to 3.7: ([\d.]+)", report.lines[2])[1])
    give_ladder_readme(folder, rung_2_s=f"{seconds:.1f}")
    assert refusals(folder) == []
    give_ladder_readme(folder, rung_2_s=f"{seconds - 1:.1f}", rung_0_s="30", rung_9_loss="3.9")
    found = refusals(folder)
    assert len(found) == 3 and all("better than the logs: rung_" in line for line in found)


@pytest.mark.parametrize("change, words", [
    (dict(num_steps=50), "different tokens trained between the rungs"),
    (dict(header=dict(config_batch_tokens=1000), result=dict(tokens_trained=40 * 524288)), "different batch_tokens"),
    (dict(header=dict(data=dict(train=OTHER_TRAIN, val=VAL_FILES))), "different training data between the runs"),
    (dict(header=dict(devices=["NVIDIA H200"])), "different hardware between the runs"),
    (dict(source=SOURCE + "RUNG = 1\n"), "two rungs ran the same source"),
    (dict(result=dict(status="target_reached", step=30)), "3_untied.txt: stopped when it saw its target"),
    (dict(header=dict(run_id="run-1")), "one run counted twice"),
])
def test_refused_ladder(tmp_path, change, words):
    found = refusals(make_ladder(tmp_path / "ladder", **change))
    assert any(words in line for line in found), found


def test_refused_ladder_claims(tmp_path):
    folder = make_ladder(tmp_path / "ladder")
    give_ladder_readme(folder, target='"soon"')
    assert refusals(folder) == ["README.md: target is soon, not a number"]
    give_ladder_readme(folder, n="5")
    assert refusals(folder) == ["README.md says better than the logs: n 5, the folder holds 4"]


# ---------------------------------------------------------------------------------------------- table and front door

def test_table_and_folders_agree():
    reports = [check.check_folder(folder) for folder in check.record_folders()]
    assert {report.folder.name: report.refusals for report in reports if report.refusals} == {}
    assert check.around_table((ROOT / "records" / "README.md").read_text(encoding="utf-8"))[1] == check.summary(reports)


def test_every_folder_here_is_named_as_a_record():
    strange = {path.name for path in (ROOT / "records").iterdir() if path.is_dir()} - {"__pycache__"}
    assert strange == {path.name for path in check.record_folders()}


@pytest.mark.parametrize("name", ["2027-01-31_My-Idea", "2027-01-31_My Idea", "2027-01-31_Idea.2"])
def test_folders_with_any_sign_in_their_names_are_checked(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(check.record_folders, "__defaults__", (tmp_path,))
    make_record(tmp_path / name)
    assert check.main([]) == 0 and "folders checked: 1, refused: 0" in capsys.readouterr().out
    assert check.check_folder(tmp_path / name).row.startswith(
        f"| 2027-01-31 | [{name[11:]}]({name.replace(' ', '%20')}/) |")         # a link ends at a space


def test_ladder_sources_extract_and_import(tmp_path):
    sources = {}
    for folder in check.record_folders():
        if check.check_folder(folder).kind == "ladder":
            sources |= {log.source_sha256: log for log in logs_in(folder)[0]}
    if not sources:
        pytest.skip("no ladder in records/ yet")
    for sha, log in sources.items():
        replay.write_source(log, tmp_path / f"rung_{sha[:12]}.py")
    names = [path.stem for path in tmp_path.glob("*.py")]
    subprocess.run([sys.executable, "-c", f"import {', '.join(names)}"], cwd=tmp_path, check=True, timeout=120)


def test_main_from_any_folder(tmp_path):
    make_record(tmp_path / "2027-01-31_Good")
    script = ROOT / "records" / "check.py"
    good = subprocess.run([sys.executable, script, "2027-01-31_Good"], cwd=tmp_path, capture_output=True, text=True)
    assert good.returncode == 0 and good.stdout.endswith("folders checked: 1, refused: 0\n"), good.stderr


def test_main_exit_codes_summary_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "RECORDS", tmp_path)
    monkeypatch.setattr(check.record_folders, "__defaults__", (tmp_path,))
    (tmp_path / "README.md").write_text(f"a\n{check.TABLE_BEGIN}\n{check.TABLE_END}\nb\n", encoding="utf-8")
    assert check.main([]) == 0 and "folders checked: 0" in capsys.readouterr().out
    make_record(tmp_path / "2027-01-31_Good")
    make_record(tmp_path / "2027-02-01_Bad")
    give_readme(tmp_path / "2027-02-01_Bad", time_s="1.00")
    assert check.main([]) == 1 and "refused: README.md says better than the logs" in capsys.readouterr().out
    assert check.main(["--write-table"]) == 1
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("a\n") and text.endswith("\nb\n") and "[Good]" in text and "[Bad]" not in text
    assert check.main(["--summary", str(tmp_path / "2027-01-31_Good")]) == 0
    assert check.around_table(text)[1] in capsys.readouterr().out
    assert check.main([str(tmp_path / "nowhere")]) == 1 and "no such folder" in capsys.readouterr().out
    assert check.main(["--draft", str(tmp_path / "nowhere")]) == 1


# ---------------------------------------------------------------------------------------------- compare, plot

def test_compare_rooms_counts_lines_by_room():
    changed = SOURCE.replace("return x + 1", "return x + 2\n    # --- a comment").replace("import sys\n", "")
    assert compare.compare_rooms(SOURCE, changed) == [
        "source: 2 rooms differ, +2 -2 lines (11 -> 11)", "  0. Door: +0 -1", "  3. Kernels: +2 -1"]
    added = f"{SOURCE}{RULE}\n# 4. Optimizer\nlr = 1\n"
    assert compare.compare_rooms(SOURCE, added)[1] == "  4. Optimizer (only in B): +3 -0"
    assert compare.compare_rooms(SOURCE, SOURCE) == ["source: the same"]


def test_compare_two_sets_of_runs(tmp_path, capsys):
    folder = make_record(tmp_path / "record", header=dict(config_lr=2.0))
    assert compare.main([str(folder / "baseline"), str(folder)]) == 0
    text = capsys.readouterr().out
    assert "  lr: (absent) -> 2.0" in text and "3. Kernels: +0 -1" in text
    last = next(line for line in text.splitlines() if "step 40:" in line)
    delta, low, high = check.difference(list(RECORD_LOSSES.values()), list(RECORD_LOSSES.values()))
    assert f"{delta:+.4f} [{low:+.4f}, {high:+.4f}]" in last
    assert "at the end (step 40 -> 40): 3.4754 -> 3.4754" in text
    assert "seconds to 3.48 (interpolated)" in text and "mean step: 99" in text
    one_each = [str(folder / "run-10.txt"), str(folder / "baseline" / "run-10.txt")]
    assert compare.main(one_each) == 0 and "no interval: needs 2 runs a side" in capsys.readouterr().out
    assert compare.main([str(folder / "README.md"), str(folder)]) == 2
    assert "not a log" in capsys.readouterr().err


def test_compare_losses_at_equal_seconds(tmp_path):
    slow, fast = (parse_log(write_log(tmp_path / str(ms), step_ms=ms)) for ms in (1000.0, 500.0))
    middle = slow.validation[2].seconds
    assert compare.loss_at(slow, middle) == slow.validation[2].loss
    assert compare.loss_at(fast, middle) == pytest.approx(fast.validation[-1].loss, abs=0.02)
    assert math.isnan(compare.loss_at(fast, 1e6))


def test_the_last_of_the_equal_times_is_not_past_the_end(tmp_path):
    start, end = 0.7, 2.9
    assert start + (end - start) > end                                         # by rounding
    path = write_log(tmp_path, num_steps=20, step_ms=35.0)
    for step, ms in ((10, 1000 * start), (20, 1000 * end)):
        path.write_text(re.sub(rf"(step:{step}/20 val_loss:\S+ train_time:)\d+", rf"\g<1>{ms:.0f}", path.read_text()))
    log = parse_log(path)
    assert [point.seconds for point in log.validation[1:]] == [start, end]
    assert not any("nan" in line for line in compare.compare_losses([log], [log]))


def test_compare_says_b_minus_a_in_every_line(tmp_path, capsys):
    slow = {11: 3000.0, 25: 2000.0}
    versions = header_for()["versions"] | dict(nccl="2.3", torch="2.12.0")
    sides = dict(a=dict(step_ms=1000.0, val_loss=3.46996, slow=slow, result=dict(peak_memory_mib=100),
                        header=dict(versions=header_for()["versions"] | dict(hip="6.2"))),
                 b=dict(step_ms=500.0, val_loss=3.47004, result=dict(peak_memory_mib=350),
                        header=dict(config_micro_rows=1, versions=versions)))
    logs = {}
    for name, settings in sides.items():
        for seed in (1, 2):
            write_log(tmp_path / name, seed, **settings | dict(val_loss=settings["val_loss"] + 1e-6 * seed))
        logs[name] = logs_in(tmp_path / name)[0]
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "configuration: the same\nnote: hip 6.2 -> None\nnote: nccl None -> 2.3\nnote: torch 2.11" in text
    assert "    step 40: 3.4700 -> 3.4700, +0.0001 [" in text                 # by the result's digits, not the line's
    seconds = [[log.train_time_s for log in side] for side in logs.values()]
    point = check.mean(seconds[1]) / check.mean(seconds[0])
    assert f"ratio B / A {point:.4f} [" in text and point < 0.6
    for what, of_steps in (("mean step", check.mean), ("median step", statistics.median)):
        a, b = (check.mean([of_steps(log.step_times_ms) for log in side]) for side in logs.values())
        assert f"{what}: {a:.2f} -> {b:.2f} ms, {b - a:+.2f} [" in text
    assert "slow steps a run: 2.0 -> 0.0" in text and "peak_memory_mib: 100 -> 350 MiB, +250" in text
    a, b = (check.mean([log.seconds_to(3.48) for log in side]) for side in logs.values())
    assert f"seconds to 3.48 (interpolated): {a:.2f} -> {b:.2f} s, {b - a:+.2f} [" in text
    start, end = logs["a"][0].validation[1].seconds, min(log.validation[-1].seconds for log in logs["b"])
    found = re.findall(r"^    ([\d.]+) s: (\S+) -> (\S+),", text, re.M)
    assert [float(at) for at, *_ in found] == pytest.approx([start + (end - start) * i / 4 for i in range(5)], abs=0.06)
    for at, *losses in found[1:-1]:
        for loss, side in zip(losses, logs.values()):
            assert float(loss) == pytest.approx(check.mean([compare.loss_at(log, float(at)) for log in side]), abs=0.01)
    assert compare.main([str(tmp_path / "nothing"), str(tmp_path / "b")]) == 2


def test_a_loss_between_two_validations_lies_on_their_line(tmp_path):
    log = parse_log(write_log(tmp_path, 1))
    before, after = log.validation[1:3]
    for share in (0.0, 0.25, 1.0):
        seconds = before.seconds + share * (after.seconds - before.seconds)
        assert compare.loss_at(log, seconds) == pytest.approx(before.loss + share * (after.loss - before.loss))
    for point in (before, log.validation[-1]):                                 # a loss that is just reached
        assert log.seconds_to(point.loss) == point.seconds
    assert log.seconds_to((before.loss + after.loss) / 2) == pytest.approx((before.seconds + after.seconds) / 2)
    write_log(tmp_path, 2, val_loss=3.49)
    lines = compare.compare_losses([log], [parse_log(tmp_path / "run-2.txt")])
    assert "  runs that pass 3.48: 1 of 1 -> 0 of 1" in lines


@pytest.mark.parametrize("times, found", [
    ([100.0] * 15 + [124.0] + [100.0] * 15, []), ([100.0] * 15 + [126.0] + [100.0] * 15, [(16, 100.0, "")]),
    ([1.0] * 15 + [1.45] + [1.0] * 15, []), ([1.0] * 15 + [1.55] + [1.0] * 15, [(16, 1.0, "")]),
    ([300.0] + [100.0] * 9 + [200.0, 250.0] + [100.0] * 19, [(1, 100.0, "first step"), (12, 100.0, ""),
                                                            (11, 100.0, "after validation")]),
    ([100.0] * 20 + [150.0] * 20, [])])
def test_slow_steps_are_a_quarter_over_the_median_around_them_and_half_a_millisecond(tmp_path, times, found):
    write_log(tmp_path, 1, num_steps=len(times), slow=dict(enumerate(times, 1)))
    slow = parse_log(tmp_path / "run-1.txt").slow_steps
    assert [(step.step, step.usual_ms, step.why) for step in slow] == found


def test_what_a_log_says_of_its_run(tmp_path):
    stopped = dict(status="target_reached", step=20, tokens_trained=2_000_000, val_tokens=77)
    log = parse_log(write_log(tmp_path, 1, result=stopped, header=dict(
        devices=["NVIDIA H100"], world_size=8, config_batch_tokens=200_000)))
    assert log.hardware == "8 x NVIDIA H100" and log.val_tokens == 77 and not log.finished
    assert log.tokens_at(10) == 1_000_000                # of 20 steps that were done, not of 40
    edit_log(tmp_path / "run-1.txt", "step:20/40 val_loss", "step:10/40 val_loss")
    with pytest.raises(LogError, match="step 10 follows step 10"):
        parse_log(tmp_path / "run-1.txt")


def test_curves_are_means_and_bands_and_axes_leave_out_the_fall(tmp_path):
    pytest.importorskip("matplotlib")
    logs = [parse_log(write_log(tmp_path, seed, step_ms=ms, val_loss=loss, result=dict(tokens_trained=tokens)))
            for seed, ms, loss, tokens in ((1, 1000.0, 3.4, 4e7), (2, 2000.0, 3.5, 8e7), (3, 3000.0, 3.9, 12e7))]
    curve = plot.mean_curve(logs)
    assert (curve["loss"][-1], curve["low"][-1], curve["high"][-1]) == pytest.approx((3.6, 3.4, 3.9))
    assert curve["seconds"][-1] == pytest.approx(check.mean([log.train_time_s for log in logs]), rel=1e-3)
    assert curve["tokens"][-1] == pytest.approx(8e7)
    curves = [dict(high=[9.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0], low=[8.0, 5.0, 4.0, 3.5, 3.2, 3.1, 3.0])]
    for target, low in ((None, 3.0), (2.0, 2.0), (3.05, 3.0)):
        room = 4.0 - low                                 # a third of seven validations: the third one
        assert plot.loss_limits(curves, target) == pytest.approx((low - 0.08 * room, 4.0 + 0.08 * room))
    flat = [dict(high=[3.0] * 4, low=[3.0] * 4)]
    assert plot.loss_limits(flat, None) == pytest.approx((2.9984, 3.0016))


def test_a_picture_of_runs_shows_their_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    write_log(tmp_path / "a", 1, step_ms=100.0, slow={5: 900.0, 12: 130.0, 20: 140.0, 28: 150.0, 36: 160.0})
    write_log(tmp_path / "b", 1, step_ms=100.0)
    by_time, by_tokens, steps = plot.draw_runs(plot.read_places([tmp_path / "a", tmp_path / "b"])).axes
    log = parse_log(tmp_path / "a" / "run-1.txt")
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(log.train_time_s, rel=1e-3)
    assert by_tokens.lines[0].get_xdata()[-1] == pytest.approx(40 * 524288 / 1e6)
    assert any(text.get_text() == "target 3.48" for text in by_time.texts)
    trace = steps.lines[0]
    assert list(trace.get_xdata()) == [*range(1, 41)] and trace.get_ydata()[10] == log.step_times_ms[10]
    usual = max(ms for side in "ab" for ms in parse_log(tmp_path / side / "run-1.txt").step_times_ms if ms < 125)
    assert max(trace.get_ydata()) == pytest.approx(2 * usual, rel=0.01)       # cut at twice the usual, and marked
    cut = [line for line in steps.lines if line.get_marker() == "^"]
    assert [line.get_xdata()[0] for line in cut] == [5]
    assert [text.get_text() for text in steps.texts] == [
        "step 5: 900 ms", "step 20: 140 ms", "step 28: 150 ms", "step 36: 160 ms"]      # the four slowest
    assert "slow steps named, 4 of 5" in steps.get_title("left")
    write_log(tmp_path / "b", 1, header=dict(config_target_loss=3.28))
    by_time = plot.draw_runs(plot.read_places([tmp_path / "a", tmp_path / "b"])).axes[0]
    assert not any("target" in text.get_text() for text in by_time.texts)      # of two different ones none


def test_plots_are_written(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    folder = make_record(tmp_path / "record", slow={11: 3000.0, 40: 2000.0})
    assert plot.main([str(folder), "-o", str(tmp_path / "runs.png")]) == 0
    ladder = make_ladder(tmp_path / "ladder")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert [(label, len(logs)) for label, logs in plot.read_places([folder, ladder])] == [
        ("record", 6), ("record: baseline", 6), ("0_adamw", 1), ("1_muon", 1), ("2_modern_parts", 1), ("3_untied", 1)]
    figure = plot.draw_runs(plot.read_places([folder]))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert any(text.startswith("step 11: 3,000 ms, after validation") for text in texts)
    labels = {axes.get_xlabel() for axes in figure.axes}
    assert labels == {"timed training seconds", "training tokens (millions)", "step"}
    capsys.readouterr()
    assert plot.main([str(tmp_path / "nothing"), "-o", str(tmp_path / "x.png")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "x.png").exists()


def test_a_picture_is_written_where_plot_says_or_refused_in_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    log = write_log(tmp_path, 1)
    for name, written in (("runs", "runs.png"), ("v.2.", "v.2.png"), ("runs.svg", "runs.svg")):
        assert plot.main([str(log), "-o", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / written}\n" and (tmp_path / written).is_file()
    assert plot.main([str(log), "-o", str(tmp_path / "runs.xyz")]) == 2
    error = capsys.readouterr().err
    assert "runs.xyz: expected a name that ends in one of ." in error and error.count("\n") == 1


def test_names_with_odd_signs_are_drawn_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("_hidden", "$a_$_b^", "a$b"):
        write_log(tmp_path / name, 1)
    figure = plot.draw_runs(plot.read_places(sorted(path for path in tmp_path.iterdir())))
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == [
        r"\$a_\$_b^ (n = 1)", "_hidden (n = 1)", r"a\$b (n = 1)"]
    figure.savefig(tmp_path / "runs.png")
    names = {"base": "_base", "idea": "$i_$^", "large": "$_$^"}
    (tmp_path / "table.csv").write_text(re.sub("base|idea|large", lambda word: names[word[0]], TABLE).replace(
        "small/", f"{tmp_path}/_hidden/"))                                     # an absolute pattern, too
    recipes = plot.read_scaling(tmp_path / "table.csv")
    figure = plot.draw_scaling(recipes)
    figure.savefig(tmp_path / "scaling.png")
    assert [text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()][:2] == ["_base", r"\$i_\$^"]


TABLE = """recipe,size,log,gpu_seconds,loss
base,small,figure,100,4.0
base,large,figure,1600,3.0
idea,small,small/*.txt,,
idea,large,figure,400,3.0
"""


def test_a_scaling_table_gives_points_and_ratios(tmp_path):
    for seed, loss in ((1, 3.9), (2, 4.1)):
        write_log(tmp_path / "small", seed, val_loss=loss, step_ms=1000, header=dict(world_size=2))
    (tmp_path / "table.csv").write_text(TABLE, encoding="utf-8")
    recipes = plot.read_scaling(tmp_path / "table.csv")
    head, *lines = TABLE.splitlines()
    (tmp_path / "table.csv").write_text("\n".join([head, *reversed(lines)]), encoding="utf-8")
    again = plot.read_scaling(tmp_path / "table.csv")                          # the cheapest first, whatever the order
    assert again["idea"] == recipes["idea"] and again["base"] == recipes["base"]
    small, large = recipes["idea"]
    seconds = [2 * parse_log(tmp_path / "small" / f"run-{seed}.txt").train_time_s for seed in (1, 2)]
    assert small == plot.Scale("idea", "small", pytest.approx(sum(seconds) / 2), pytest.approx(4.0), False)
    assert large == plot.Scale("idea", "large", 400.0, 3.0, True)
    assert plot.gpu_seconds_to(recipes["base"], 3.5) == pytest.approx(400)      # half way on a logarithmic axis
    assert plot.gpu_seconds_to(recipes["base"], 2.9) is None and plot.gpu_seconds_to(recipes["base"], 4.1) is None
    found = plot.scaling_ratios(*recipes.values(), target=3.5)
    assert [loss for loss, *_ in found] == [4.0, 3.5, 3.0]
    assert found[-1] == (3.0, pytest.approx(1600), pytest.approx(0.25))
    assert found[1][2] == pytest.approx(math.sqrt(small.gpu_seconds * 400) / 400)


def test_a_scaling_picture_is_800_pixels_wide_and_says_what_is_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    write_log(tmp_path / "small", 1, val_loss=4.0)
    (tmp_path / "table.csv").write_text(TABLE, encoding="utf-8")
    picture = tmp_path / "scaling.png"
    assert plot.main([f"--scaling={tmp_path / 'table.csv'}", "--target=3.5", "-o", str(picture)]) == 0
    assert int.from_bytes(picture.read_bytes()[16:20], "big") == 800
    figure = plot.draw_scaling(plot.read_scaling(tmp_path / "table.csv"), 3.5)
    above, below = figure.axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == [
        "base", "idea", "a figure, no log", "target 3.5"]
    hollow = [line for line in above.lines if len(line.get_xdata()) == 1 and line.get_markerfacecolor() == "white"]
    assert len(hollow) == 3 and any(text.get_text() == "0.250 at 3.000" for text in below.texts)


@pytest.mark.parametrize("old, new, words", [
    ("figure,400,3.0", "figure,,3.0", "line 5 is a figure without numbers"), ("idea", "base", "holds 1 recipes"),
    ("figure,400", "figure,0", "seconds above 0"), ("small/*.txt", "none/*.txt", "no log matches none/*.txt"),
    ("idea,large", "idea,", "line 5 lacks recipe, size or log"), ("small/*.txt", "table.csv", "table.csv: not a log")])
def test_a_scaling_table_is_refused_in_one_line(tmp_path, capsys, old, new, words):
    write_log(tmp_path / "small", 1, val_loss=4.0)
    (tmp_path / "table.csv").write_text(TABLE.replace(old, new), encoding="utf-8")
    assert plot.main([f"--scaling={tmp_path / 'table.csv'}"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# ---------------------------------------------------------------------------------------------- replay, seeds

def test_replay_writes_the_source_only_if_its_sha_is_right(tmp_path, capsys):
    path, target = write_log(tmp_path, 1), tmp_path / "attempts" / "again.py"
    assert replay.main([str(path), "--write", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == SOURCE
    target.write_text("mine\n", encoding="utf-8")
    assert replay.main([str(path), "--write", str(target)]) == 2
    assert target.read_text(encoding="utf-8") == "mine\n" and "not overwritten" in capsys.readouterr().err
    edit_log(path, "x + 1", "x + 2")
    assert replay.main([str(path), "--write", str(tmp_path / "other.py")]) == 2
    assert "not the one that its header names" in capsys.readouterr().err and not (tmp_path / "other.py").exists()


def test_replay_arguments(tmp_path):
    header = dict(argv=["--seed=3", "--num_steps=1e2", "--log_dir=old", "--deterministic"],
                  overrides=dict(seed=3, num_steps=100, log_dir="old", deterministic="on"))
    log = parse_log(write_log(tmp_path, 3, header=header))
    assert replay.arguments_of(log, ["--seed=5"]) == [
        "--preset=sprint", "--num_steps=1e2", "--deterministic=on", "--seed=5"]


def test_replay_runs_what_the_log_holds(tmp_path, monkeypatch):
    source = ("import sys\nfrom pathlib import Path\n"
              "Path(sys.argv[-1]).write_text(' '.join(sys.argv[1:]))\nsys.exit(3)\n")
    path = write_log(tmp_path / "logs", 1, source=source)
    monkeypatch.setattr(replay, "ROOT", tmp_path)
    assert replay.main([str(path), "--", str(tmp_path / "seen")]) == 3
    assert (tmp_path / "seen").read_text() == f"--preset=sprint --seed=1 {tmp_path / 'seen'}"
    edit_log(path, '"world_size": 1', '"world_size": 8')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replay.main([str(path)]) == 2


TRAINER = f'''
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import log_helpers
given = dict(word[2:].split("=") for word in sys.argv[1:])
seed = int(given["seed"])
if seed == int(os.environ.get("FAIL_SEED", 0)):
    sys.exit(3)
if seed == int(os.environ.get("LIE_SEED", 0)):
    sys.exit(0)
status = dict(status="stopped", step=20) if seed == int(os.environ.get("STOP_SEED", 0)) else None
log_helpers.write_log(given["log_dir"], seed, source=open(__file__).read(), val_loss=3.47 + 0.001 * seed, result=status,
                      header=dict(argv=sys.argv[1:], overrides=given, run_id=__file__ + str(seed)))
print("on GPU", os.environ.get("CUDA_VISIBLE_DEVICES"))
'''


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "idea.py"
    path.write_text(TRAINER, encoding="utf-8")
    (tmp_path / "base.py").write_text(TRAINER + "# base\n", encoding="utf-8")
    return path


def test_seeds_runs_skips_and_resumes(tmp_path, trainer, monkeypatch, capfd):
    out = tmp_path / "out"
    command = ["--n=2", f"--out={out}", "--nproc=1", f"--baseline={tmp_path / 'base.py'}", str(trainer), "--lr=2"]
    monkeypatch.setenv("STOP_SEED", "2")
    assert seeds.main(command) == 1
    text = capfd.readouterr()
    assert "no finished log for this seed" in text.err and "idea seed 2 has no finished log" in text.err
    monkeypatch.delenv("STOP_SEED")
    assert seeds.main(command) == 0
    text = capfd.readouterr().out
    assert "2 runs into" in text and "2 are there already" in text and "moved to unfinished/" in text
    assert "ratio of mean times to the baseline: 1.0000" in text and "validation loss: mean 3.4715" in text
    order = [seed_and_arm[1] for seed_and_arm in re.finditer(r"seeds: (\S+ ?\S* seed \d):? .*python", text)]
    assert order == ["idea seed 2", "baseline base seed 2"]
    assert sorted(path.name for path in out.glob("**/run-*.txt")) == ["run-1.txt"] * 2 + ["run-2.txt"] * 4
    assert seeds.main(command) == 0 and "0 runs into" in capfd.readouterr().out
    assert seeds.main(command[:-1] + ["--lr=3"]) == 2 and "other arguments (--lr=2)" in capfd.readouterr().err
    trainer.write_text(TRAINER + "# changed\n", encoding="utf-8")
    assert seeds.main(command) == 2 and "another source" in capfd.readouterr().err


def test_seeds_one_per_gpu_and_truthful(tmp_path, trainer, monkeypatch, capfd):
    out = tmp_path / "out"
    monkeypatch.setenv("FAIL_SEED", "2")
    monkeypatch.setenv("LIE_SEED", "3")
    assert seeds.main(["--n=3", f"--out={out}", "--gpus=0,5", str(trainer)]) == 1
    text = capfd.readouterr()
    assert "seed 1 on GPU 0" in text.out and "seed 2 on GPU 5" in text.out
    assert "idea seed 2: exit status 3" in text.err and "idea seed 3: no finished log" in text.err
    assert [path.name for path in out.glob("*.txt")] == ["run-1.txt"]


def test_one_campaign_at_a_time_writes_to_a_folder(tmp_path, trainer, capfd):
    out = tmp_path / "out"
    command = ["--n=1", f"--out={out}", "--nproc=1", f"--baseline={tmp_path / 'base.py'}", str(trainer)]
    running = write_log(out, 1, result=dict(status="stopped", step=20))
    with open(out / "seeds.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert seeds.main(command) == 2
        error = capfd.readouterr().err
        assert f"another seeds.py runs into {out}" in error and error.count("\n") == 1 and running.exists()
    assert seeds.main(command) == 0 and (out / "unfinished" / running.name).exists()
    (tmp_path / "file").write_text("")
    assert seeds.main(["--n=1", f"--out={tmp_path / 'file'}", str(trainer)]) == 2
    assert "file can't be written to (" in capfd.readouterr().err


def test_only_logs_move_out_of_the_way(tmp_path, trainer):
    out = tmp_path / "out"
    write_log(out, 7, result=dict(status="stopped", step=20))
    broken_off = "2026-11-29_01-43-22_9e805c77.txt"                            # before its header
    for name in ("notes.txt", broken_off):
        (out / name).write_text("nothing of a run\n")
    assert seeds.main(["--n=1", f"--out={out}", "--nproc=1", str(trainer)]) == 0
    assert sorted(path.name for path in out.glob("*.txt")) == ["notes.txt", "run-1.txt"]
    assert sorted(path.name for path in out.glob("unfinished/*")) == [broken_off, "run-7.txt"]


def test_seeds_means_the_callers_folders(tmp_path, trainer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "val_1.bin").write_text("")
    arms, *_ = seeds.plan(["--n=1", "--out=~/logs", "idea.py", "--train_files=data/none/*.bin,mine", "--lr=mine",
                           "--val_files=mine/val_*.bin, /x/*.bin"])
    assert arms[0].folder == tmp_path / "home" / "logs"
    assert arms[0].args == (f"--train_files=data/none/*.bin,{tmp_path}/mine", "--lr=mine",
                            f"--val_files={tmp_path}/mine/val_*.bin, /x/*.bin")
    monkeypatch.setattr(seeds, "ROOT", tmp_path)                               # there paths stay as they were typed
    assert seeds.plan(["--n=1", "idea.py", "--val_files=mine"])[0][0].args == ("--val_files=mine",)


@pytest.mark.parametrize("gpus, both, said", [("0,5", True, True), ("0", True, False), ("0,5", False, False)])
def test_arms_that_start_at_once_can_be_no_record_and_seeds_says_so(tmp_path, trainer, capfd, gpus, both, said):
    baseline = [f"--baseline={tmp_path / 'base.py'}"] if both else []
    assert seeds.main(["--n=1", f"--out={tmp_path / 'out'}", f"--gpus={gpus}", *baseline, str(trainer)]) == 0
    assert ("can't be a record claim" in capfd.readouterr().out) == said


def test_seeds_refuses_in_one_line(tmp_path, trainer, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for command, words in ((["--n=1", "--gpus", str(trainer)], "no GPU is here"),
                           (["--n=0", str(trainer)], "at least one seed"),
                           (["--n=1", str(trainer), "--seed=4"], "no --seed"),
                           (["--n=1", str(tmp_path / "none.py")], "no script")):
        assert seeds.main(command) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert os.listdir(tmp_path) and not (tmp_path / "out").exists()


def test_a_log_of_a_run_that_broke_off_parses_and_can_be_no_record(tmp_path):
    text = log_text()
    path = tmp_path / "broken.txt"
    path.write_text(text[:text.rindex("result:")] + 'result:{"status": "failed", "reason": "step 7: loss is nan"}\n')
    log = parse_log(path)
    assert log.result is None and not log.finished and log.validation
