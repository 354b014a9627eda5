"""Checks record folders: recomputes every claim from the logs and refuses what the logs don't carry.

    python records/check.py                      all folders records/<date>_<Name>/
    python records/check.py FOLDER...            these folders
    python records/check.py --draft FOLDER...    print a claim block for the folder's README.md, computed from its logs
    python records/check.py --summary [FOLDER..] print the table of records/README.md
    python records/check.py --write-table        put that table between the markers of records/README.md

A folder holds README.md and the logs (*.txt); logs of the baseline, run on the same machine in the same call, lie in
its baseline/ sub-folder. README.md carries one fenced block that opens with ```claim and holds `key: value` lines; the
keys are in CLAIM_KEYS. Each refusal is one line; any refusal makes the exit status 1 (2: wrong usage).

Statistics: p is the one-sided one-sample t-test that the mean validation loss is below the target. The ratio of mean
times has a 95% Fieller interval with Welch's degrees of freedom.
"""

import argparse
import math
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records.logs import Log, LogError, logs_in  # noqa: E402

RECORDS = ROOT / "records"
MAX_LOG_BYTES = 300_000
MIN_RECORD_RUNS = 6
MAX_P = 0.01
NOT_A_RECORD = "not a record claim"
UNNAMED = "NAME THE DATA SET"
CLAIM_KEYS = {   # kind: (required keys, further allowed keys)
    "record": ({"kind", "time_s", "val_loss", "n", "target", "p", "hardware", "data", "ratio"}, set()),
    "run": ({"kind", "time_s", "val_loss", "n", "hardware", "data"}, {"target", "p", "ratio"}),
    "rung": ({"kind", "time_s", "val_loss", "n", "hardware", "data"}, {"target"}),
    "ladder": ({"kind", "n", "target", "hardware", "data"}, {"rung_<number>_s", "rung_<number>_loss"}),
}
TABLE_BEGIN, TABLE_END = "<!-- table: written by check.py -->", "<!-- end of table -->"
TABLE_HEAD = ("| date | folder | kind | hardware | data | target | n | val loss (sd) | p | seconds (sd) | "
              "ratio to baseline [95%] |\n|---|---|---|---|---|---|---|---|---|---|---|")
_FOLDER_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_(\w+)")
_RUNG_NAME = re.compile(r"(?:rung_?)?(\d+)_(\w+)")
_CLAIM_BLOCK = re.compile(r"^```claim[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


class NeedsScipy(Exception):
    """scipy is not installed; the message says how to get it."""


class ClaimError(Exception):
    """One readable line about a README whose claim can't be read."""


@dataclass
class Report:
    """What the check of one folder found. `refusals` empty: the logs carry the claim. `row`: its line in the table."""
    folder: Path
    kind: str = "?"
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    row: str = ""


@dataclass(frozen=True)
class Rung:
    """One step of a ladder: its runs, in order of `number`."""
    number: int
    title: str
    logs: tuple[Log, ...]

    @property
    def val_loss(self) -> float:
        return mean([log.val_loss for log in self.logs])

    def seconds_to(self, loss: float) -> float | None:
        """Mean timed seconds to that validation loss; None when a run does not reach it."""
        seconds = [log.seconds_to(loss) for log in self.logs]
        return None if None in seconds else mean(seconds)


# ---------------------------------------------------------------------------------------------- statistics

def mean(values) -> float:
    """Arithmetic mean; NaN for nothing."""
    return statistics.fmean(values) if values else math.nan


def deviation(values) -> float:
    """Sample standard deviation (n - 1); NaN for fewer than two values or values that are not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def _scipy_stats():
    try:
        from scipy import stats
    except ImportError:
        raise NeedsScipy("needs scipy: pip install -r requirements-dev.txt") from None
    return stats


def p_below(losses, target: float) -> float:
    """One-sided p that the mean of `losses` is below `target`; NaN for fewer than two finite losses or equal ones."""
    if not deviation(losses) > 0:
        return math.nan
    return float(_scipy_stats().ttest_1samp(losses, target, alternative="less").pvalue)


def _welch(var_a: float, count_a: int, var_b: float, count_b: int) -> float:
    """Two-sided 95% t quantile with Welch's degrees of freedom; var_* are variances of the means (not both 0)."""
    freedom = (var_a + var_b) ** 2 / (var_a ** 2 / (count_a - 1) + var_b ** 2 / (count_b - 1))
    return float(_scipy_stats().t.ppf(0.975, freedom))


def difference(a, b) -> tuple[float, float, float]:
    """(mean(b) - mean(a), low, high) with Welch's 95% interval; low and high are NaN for fewer than two values a side
    or values that are not finite."""
    delta = mean(b) - mean(a)
    if min(len(a), len(b)) < 2 or not math.isfinite(delta):
        return delta, math.nan, math.nan
    var_a, var_b = deviation(a) ** 2 / len(a), deviation(b) ** 2 / len(b)
    half = _welch(var_a, len(a), var_b, len(b)) * math.sqrt(var_a + var_b) if var_a + var_b > 0 else 0.0
    return delta, delta - half, delta + half


def ratio(a, b) -> tuple[float, float, float]:
    """(mean(a) / mean(b), low, high) with Fieller's 95% interval, for positive values. low and high are NaN for fewer
    than two values a side or values that are not finite; high is infinite when mean(b) can't be told from zero."""
    top, bottom = mean(a), mean(b)
    point = top / bottom if bottom else math.nan
    if min(len(a), len(b)) < 2 or not math.isfinite(point):
        return point, math.nan, math.nan
    var_a, var_b = deviation(a) ** 2 / len(a), deviation(b) ** 2 / len(b)
    if var_a + var_b == 0:
        return point, point, point
    t = _welch(var_a, len(a), point ** 2 * var_b, len(b))
    # All r with (top - r bottom)^2 <= t^2 (var_a + r^2 var_b): a quadratic in r.
    square, product, constant = bottom ** 2 - t ** 2 * var_b, top * bottom, top ** 2 - t ** 2 * var_a
    if square <= 0:
        return point, 0.0, math.inf
    root = math.sqrt(max(0.0, product ** 2 - square * constant))
    return point, (product - root) / square, (product + root) / square


def format_interval(low: float, high: float, digits: int = 3) -> str:
    return "[no interval: needs 2 runs a side]" if math.isnan(low) else f"[{low:.{digits}f}, {high:.{digits}f}]"


# ---------------------------------------------------------------------------------------------- what logs carry

def log_refusals(log: Log, kind: str) -> list[str]:
    """What is wrong with one log for a claim of this kind."""
    name, found = log.path.name, []
    if log.size_bytes > MAX_LOG_BYTES:
        found.append(f"{name}: {log.size_bytes:,} bytes, more than {MAX_LOG_BYTES:,}")
    if not log.sha_matches:
        found.append(f"{name}: the embedded source has sha256 {log.source_sha256[:12]}, its header says "
                     f"{str(log.header['source_sha256'])[:12]}")
    if log.resumed:
        found.append(f"{name}: the run was resumed from a checkpoint")
    if kind == "record" and log.disqualifying_overrides:
        given = " ".join(f"--{key}={value}" for key, value in log.disqualifying_overrides.items())
        found.append(f"{name}: overridden by hand ({given}); a record's numbers stand in its source")
    bad = [point.step for point in log.validation + log.training if not math.isfinite(point.loss)]
    if log.result is None:
        found.append(f"{name}: no result line: the run was cut short, or still runs")
    elif bad or log.result["status"] == "non_finite" or not math.isfinite(log.val_loss):
        found.append(f"{name}: a loss is not finite{f' (step {min(bad)})' if bad else ''}")
    elif not (math.isfinite(log.train_time_s) and log.train_time_s > 0):
        found.append(f"{name}: its training time is {log.train_time_s} s")
    elif not log.finished and log.result["status"] == "target_reached" and kind != "run":
        found.append(f"{name}: stopped when it saw its target (step {log.result['step']}/{log.result['num_steps']}): "
                     "a loss chosen by looking proves nothing")
    elif not log.finished and log.result["status"] != "target_reached":
        found.append(f"{name}: incomplete ({log.result['status']} at step {log.result['step']}/"
                     f"{log.result['num_steps']})")
    else:
        found += _result_refusals(log)
    return found


def _result_refusals(log: Log) -> list[str]:
    """Where the result line of a finished log disagrees with its step lines."""
    name, found, last = log.path.name, [], log.validation[-1] if log.validation else None
    if last is None or last.step != log.result["step"]:
        return [f"{name}: no validation line at its last step {log.result['step']}"]
    if abs(last.loss - log.val_loss) > 0.00011:
        found.append(f"{name}: result says val_loss {log.val_loss:.4f}, its last validation line {last.loss:.4f}")
    if not abs(last.seconds - log.train_time_s) <= 0.0021:
        found.append(f"{name}: result says {log.train_time_s:.3f} s, its last validation line {last.seconds:.3f} s")
    wanted = log.config.get("val_tokens")
    if wanted and log.val_tokens != wanted:
        found.append(f"{name}: validated on {log.val_tokens} tokens, its configuration says {wanted}")
    return found


def twice_refusals(logs) -> list[str]:
    """Logs that show one run twice: by run id, or by the same measured lines under another name."""
    found = []
    for what, key in (("run_id", lambda log: log.run_id), ("step lines and times", lambda log: log.measured_sha256)):
        seen = {}
        for log in logs:
            first = seen.setdefault(key(log), log)
            if first is not log and key(log) is not None:
                found.append(f"one run counted twice: {first.path.name} and {log.path.name} have the same {what}")
    return list({line.rsplit(" have ", 1)[0]: line for line in found}.values())


def same_refusals(logs, where: str) -> list[str]:
    """Where runs that are averaged or compared differ in data, validation tokens or hardware."""
    found = []
    for what, key in (("training data", lambda log: log.data_identity("train")),
                      ("validation data", lambda log: log.data_identity("val")),
                      ("validation tokens", lambda log: log.val_tokens), ("hardware", lambda log: log.hardware)):
        values = {key(log): log.path.name for log in logs}
        if len(values) > 1:
            shown = ", ".join(f"{name} {_shown(value)}" for value, name in list(values.items())[:3])
            found.append(f"different {what} {where}: {shown}")
    return found


def _shown(value) -> str:
    """A data identity, token count or hardware name in few characters."""
    return "+".join(str(mark) for mark, _ in value[:2]) or "none" if isinstance(value, tuple) else str(value)


def mixed_refusals(logs, name: str) -> list[str]:
    """Where runs of one arm did not run one recipe."""
    sources = Counter(log.source_sha256[:12] for log in logs)
    if len(sources) > 1:
        shown = ", ".join(f"{sha} in {count}" for sha, count in sources.items())
        return [f"mixed sources in {name}: {shown} logs"]
    keys = sorted({key for log in logs for key in log.config})
    mixed = [key for key in keys if len({str(log.config.get(key)) for log in logs}) > 1]
    if len({log.recipe for log in logs}) > 1:
        return [f"mixed configurations in {name}: runs differ in {', '.join(key for key in mixed if key != 'seed')}"]
    seeds = Counter(str(log.seed) for log in logs)
    return [f"seed {seed} counts {count} times in {name}: n counts seeds" for seed, count in seeds.items() if count > 1]


def describe_arm(logs, name: str = "runs") -> list[str]:
    """Readable lines about the runs of one arm: what they are, their losses with p, their times."""
    first, losses, times = logs[0], [log.val_loss for log in logs], [log.train_time_s for log in logs]
    seeds = ",".join(str(log.seed) for log in sorted(logs, key=lambda log: str(log.seed)))
    target = first.target_loss
    p = p_below(losses, target) if target is not None else math.nan
    goal = "" if target is None else f"; target {target}, " + ("p needs 2 different runs" if math.isnan(p)
                                                               else f"one-sided p {p:.2g}")
    spreads = ("", "") if len(logs) < 2 else (f", sd {deviation(losses):.4f}, {min(losses):.4f} to {max(losses):.4f}",
                                              f", sd {deviation(times):.2f}, {min(times):.2f} to {max(times):.2f}")
    prints = "+".join(str(mark) for mark, _ in first.data_identity("val"))
    torch = first.header["versions"].get("torch", "?")
    return [f"{name}: n {len(logs)}, seeds {seeds}, source {first.source_sha256[:12]}, {first.hardware}, torch {torch}",
            f"  validation loss: mean {mean(losses):.4f}{spreads[0]}{goal} ({first.val_tokens} tokens of {prints})",
            f"  training time: mean {mean(times):.2f} s{spreads[1]}"]


def arm_notes(logs) -> list[str]:
    """What a reader should know and the checker does not refuse."""
    notes, seeds = [], sorted({log.seed for log in logs if isinstance(log.seed, int)})
    missing = sorted(set(range(seeds[0], seeds[-1])) - set(seeds)) if seeds and seeds[-1] - seeds[0] < 1000 else []
    if missing:
        notes.append(f"seeds {', '.join(map(str, missing))} are not there: say why")
    if any(log.header["git"].get("dirty") for log in logs):
        notes.append("the working tree had uncommitted changes (the source in the log is what ran)")
    for log in logs:
        if log.disqualifying_overrides:
            notes.append(f"{log.path.name}: overridden by hand: {log.disqualifying_overrides}")
        notes += [f"{log.path.name}: {note}" for note in log.notes if note.startswith("warn")][:2]
    return notes


def _span_notes(logs) -> list[str]:
    """A note when the runs of both arms lie more than a day apart: one call on one machine seems unlikely."""
    try:
        started = [datetime.fromisoformat(str(log.header.get("started"))) for log in logs]
        hours = (max(started) - min(started)).total_seconds() / 3600
    except (ValueError, TypeError):
        return ["not every header says when its run started"]
    torches = sorted({str(log.header["versions"].get("torch")) for log in logs})
    notes = [f"runs and baseline ran on different torch versions: {', '.join(torches)}"] if len(torches) > 1 else []
    if hours > 24:
        notes.append(f"runs and baseline span {hours:.0f} hours: was this one call on one machine?")
    return notes


# ---------------------------------------------------------------------------------------------- what the README claims

def read_claim(folder: Path) -> dict[str, str]:
    """{key: value} of the README's claim block. Raises ClaimError: no README, no block or several, unknown or lacking
    keys."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ClaimError("no readable README.md") from None
    blocks = _CLAIM_BLOCK.findall(text)
    if len(blocks) != 1:
        raise ClaimError(f"README.md has {len(blocks)} blocks fenced with ```claim, it needs one (--draft prints it)")
    claim = {}
    for line in filter(str.strip, blocks[0].splitlines()):
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not value or key in claim:
            raise ClaimError(f"README.md: claim line is no `key: value`, or comes twice: {line}")
        claim[key] = value
    if claim.get("kind") not in CLAIM_KEYS:
        raise ClaimError(f"README.md: kind is {claim.get('kind', 'missing')}, not one of {', '.join(CLAIM_KEYS)}")
    required, optional = CLAIM_KEYS[claim["kind"]]
    unknown = [key for key in claim if re.sub(r"\d+", "<number>", key) not in required | optional]
    if unknown or required - claim.keys():
        wrong = [f"lacks {key}" for key in sorted(required - claim.keys())] + [f"has unknown {key}" for key in unknown]
        raise ClaimError(f"README.md: claim {', '.join(wrong)}")
    if claim["kind"] == "run" and NOT_A_RECORD not in text:
        raise ClaimError(f"README.md of a plain run must say that it is {NOT_A_RECORD}")
    return claim


def _number(key: str, text: str) -> tuple[Decimal, bool]:
    """A claimed number and whether it is a bound ('<0.01'). Raises ClaimError."""
    bound = text.startswith("<")
    try:
        value = Decimal(text.removeprefix("<").strip())
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise ClaimError(f"README.md: {key} is {text}, not a number")
    return value, bound


def better_than_logs(key: str, text: str, measured: float) -> str | None:
    """A refusal if the claimed number (lower is better) is below what the logs say, beyond its own rounding: half a
    unit of its last digit, and never more than 0.5 s, 0.0005 of loss, 0.005 of ratio, 5% of p."""
    try:
        value, bound = _number(key, text)
    except ClaimError as error:
        return str(error)
    most = {"loss": 0.0005, "ratio": 0.005, "p": 0.05 * measured}.get(key.rsplit("_", 1)[-1], 0.5)
    slack = min(0.5 * 10.0 ** value.as_tuple().exponent, most) * (1 + 1e-9)
    true = not math.isnan(measured) and (measured < value if bound else float(value) >= measured - slack)
    shown = "nothing" if math.isnan(measured) else f"{measured:.6g}"
    return None if true else f"README.md says better than the logs: {key} {text}, the logs say {shown}"


def _exact_refusals(claim: dict, logs, counted: int) -> list[str]:
    """Where n, hardware or the data's fingerprint in the claim are not those of the logs."""
    found = []
    if claim["n"] != str(counted):
        found.append(f"README.md says better than the logs: n {claim['n']}, the folder holds {counted}"
                     if claim["n"].isdigit() and int(claim["n"]) > counted else
                     f"README.md says n {claim['n']}, the folder holds {counted}")
    if claim["hardware"] != logs[0].hardware:
        found.append(f"README.md says hardware {claim['hardware']}, the logs say {logs[0].hardware}")
    if UNNAMED in claim["data"]:
        found.append("README.md: name the data set in the claim's data")
    for mark, _ in logs[0].data_identity("val"):
        if str(mark) not in claim["data"]:
            found.append(f"README.md's data ({claim['data']}) does not name the validation fingerprint {mark}")
    return found


# ---------------------------------------------------------------------------------------------- folders

def check_folder(folder) -> Report:
    """Check one folder; never raises for what it finds there."""
    folder = Path(folder).resolve()
    report = Report(folder)
    if not folder.is_dir():
        report.refusals.append("no such folder")
        return report
    try:
        claim = read_claim(folder)
    except ClaimError as error:
        claim = None
        report.refusals.append(str(error))
    report.kind = claim["kind"] if claim else "?"
    if report.kind == "ladder":
        _check_ladder(report, claim)
    else:
        _check_runs(report, claim)
    return report


def baseline_in(folder: Path) -> tuple[list[Log], list[str]]:
    """logs_in of the folder's baseline/, empty where there is none."""
    return logs_in(folder / "baseline") if (folder / "baseline").is_dir() else ([], [])


def _check_runs(report: Report, claim: dict | None) -> None:
    """Fill the report of a record, a plain run or a rung."""
    logs, problems = logs_in(report.folder)
    baseline, baseline_problems = baseline_in(report.folder)
    refuse = report.refusals.extend
    refuse(problems + [f"baseline: {problem}" for problem in baseline_problems])
    if not logs:
        refuse(["no log (*.txt) of a run"] if not problems else [])
        return
    for log in logs:
        refuse(log_refusals(log, report.kind))
    for log in baseline:
        refuse(f"baseline: {line}" for line in log_refusals(log, report.kind))
    refuse(twice_refusals(logs + baseline))
    refuse(mixed_refusals(logs, "the runs") + (mixed_refusals(baseline, "the baseline") if baseline else []))
    differing = same_refusals(logs, "between the runs")
    refuse(differing or same_refusals(logs + baseline, "between runs and baseline"))
    losses, times = [log.val_loss for log in logs], [log.train_time_s for log in logs]
    target = logs[0].target_loss
    p = p_below(losses, target) if target is not None else math.nan
    report.lines += describe_arm(logs)
    point, low, high = math.nan, math.nan, math.nan
    if baseline:
        report.lines += describe_arm(baseline, "baseline")
        point, low, high = ratio(times, [log.train_time_s for log in baseline])
        report.lines.append(f"ratio of mean times to the baseline: {point:.4f} {format_interval(low, high, 4)} "
                            "(95%, Fieller with Welch's degrees of freedom)")
        report.notes += _span_notes(logs + baseline)
        surplus, surely, _ = difference([log.val_loss for log in baseline], losses)
        if surely > 0:
            report.notes.append(f"the baseline's loss is lower by {surplus:.4f}: that surplus is part of the ratio")
    report.notes += arm_notes(logs) + [f"baseline: {note}" for note in arm_notes(baseline)]
    if report.kind == "record":
        refuse(_record_refusals(logs, baseline, p, high))
    if claim:
        measured = dict(time_s=mean(times), val_loss=mean(losses), p=p, ratio=point)
        found = [better_than_logs(key, claim[key], value) for key, value in measured.items() if key in claim]
        refuse([line for line in found if line] + _exact_refusals(claim, logs, len(logs)))
        if "target" in claim and (target is None or claim["target"] != str(target)):
            refuse([f"README.md says target {claim['target']}, the logs' configuration says {target}"])
        spread = (f" ({deviation(losses):.4f})", f" ({deviation(times):.2f})") if len(logs) > 1 else ("", "")
        report.row = _row(report, claim, target, len(logs), f"{mean(losses):.4f}{spread[0]}",
                          "" if math.isnan(p) else f"{p:.2g}", f"{mean(times):.2f}{spread[1]}",
                          "" if math.isnan(point) else f"{point:.4f}" + (
                              "" if math.isnan(low) else f" {format_interval(low, high, 4)}"))


def _record_refusals(logs, baseline, p: float, ratio_high: float) -> list[str]:
    """What a record needs beyond sound logs: enough runs, a significant loss, a faster time than its baseline."""
    found = []
    if len(logs) < MIN_RECORD_RUNS:
        found.append(f"{'a single run' if len(logs) == 1 else f'{len(logs)} runs'}: a record needs n >= "
                     f"{MIN_RECORD_RUNS} for its p")
    if logs[0].target_loss is None:
        found.append("the logs' configuration has no target_loss")
    elif len(logs) > 1 and not p < MAX_P:
        why = "the losses are all equal" if math.isnan(p) else f"one-sided p is {p:.2g}"
        found.append(f"mean loss is not below the target {logs[0].target_loss} with p < {MAX_P}: {why}")
    if len(baseline) < 2:
        found.append(f"{len(baseline)} logs in baseline/: the ratio needs at least 2 from the same machine and call")
    elif not ratio_high < 1:
        found.append(f"not faster than its baseline: the ratio's interval reaches {ratio_high:.4f}")
    if baseline and baseline[0].recipe == logs[0].recipe:
        found.append("runs and baseline ran the same source and configuration")
    return found


def rungs_of(folder: Path) -> tuple[list[Rung], list[str]]:
    """The rungs of a ladder folder by number (<number>_<title>.txt, or a sub-folder <number>_<title>/ with the logs of
    several seeds), and one line for each thing that is none."""
    rungs, problems = [], []
    for path in sorted(folder.iterdir()):
        if not (path.suffix == ".txt" or (path.is_dir() and any(path.glob("*.txt")))):
            continue
        name = _RUNG_NAME.fullmatch(path.stem)
        if not name:
            problems.append(f"{path.name}: not named <number>_<title>")
            continue
        logs, found = logs_in(path)
        problems += found
        if logs:
            rungs.append(Rung(int(name[1]), name[2].replace("_", " "), tuple(logs)))
    return sorted(rungs, key=lambda rung: rung.number), problems


def _check_ladder(report: Report, claim: dict) -> None:
    """Fill the report of a ladder: every rung sound, and all of them equal in tokens, batch, data and hardware."""
    rungs, problems = rungs_of(report.folder)
    refuse = report.refusals.extend
    refuse(problems)
    if not rungs:
        refuse(["no rungs (<number>_<title>.txt or sub-folders)"])
        return
    logs = [log for rung in rungs for log in rung.logs]
    for rung in rungs:
        for log in rung.logs:
            refuse(f"rung {rung.number}: {line}" for line in log_refusals(log, "ladder"))
        refuse(mixed_refusals(list(rung.logs), f"rung {rung.number}"))
    numbers = Counter(rung.number for rung in rungs)
    refuse(f"rung {number} is there {count} times" for number, count in numbers.items() if count > 1)
    refuse(twice_refusals(logs))
    refuse(same_refusals(logs, "between the rungs"))
    for what, key in (("tokens trained", lambda log: log.result and log.result.get("tokens_trained")),
                      ("batch_tokens", lambda log: log.config.get("batch_tokens"))):
        values = {str(key(log)): log.path.name for log in logs}
        if len(values) > 1:
            shown = ", ".join(f"{name} {value}" for value, name in values.items())
            refuse([f"different {what} between the rungs: {shown}"])
    recipes = Counter(rung.logs[0].recipe for rung in rungs)
    refuse(["two rungs ran the same source and configuration"] if max(recipes.values()) > 1 else [])
    refuse(_exact_refusals(claim, logs, len(rungs)))
    try:
        target = float(_number("target", claim["target"])[0])
    except ClaimError as error:
        refuse([str(error)])
        return
    for readme in sorted(report.folder.glob("*/README.md")):
        if "```claim" in readme.read_text(encoding="utf-8", errors="replace"):
            refuse(f"{readme.parent.name}: {line}" for line in check_folder(readme.parent).refusals)
    report.notes += arm_notes(logs)
    seconds = {rung.number: rung.seconds_to(target) for rung in rungs}
    measured = {}
    for rung in rungs:
        results = [log.result or {} for log in rung.logs]
        step_ms = mean([result.get("step_avg_ms") or math.nan for result in results])
        reached = "does not reach it" if seconds[rung.number] is None else f"{seconds[rung.number]:.1f} s to it"
        report.lines.append(
            f"rung {rung.number} {rung.title}: n {len(rung.logs)}, loss {rung.val_loss:.4f} at "
            f"{results[0].get('tokens_trained')} tokens, target {target}: {reached}; "
            f"{step_ms:.1f} ms a step, {results[0].get('peak_memory_mib') or '?'} MiB, "
            f"source {rung.logs[0].source_sha256[:12]}")
        measured[f"rung_{rung.number}_loss"] = rung.val_loss
        measured[f"rung_{rung.number}_s"] = math.nan if seconds[rung.number] is None else seconds[rung.number]
    for key in claim:
        if key.startswith("rung_"):
            refuse(filter(None, [better_than_logs(key, claim[key], measured.get(key, math.nan))]))
    steps = " > ".join("-" if value is None else f"{value:.1f}" for value in seconds.values())
    report.row = _row(report, claim, target, len(rungs), f"{rungs[0].val_loss:.4f} > {rungs[-1].val_loss:.4f}", "",
                      f"{steps} to target", "")


def _row(report: Report, claim: dict, target, n: int, loss: str, p: str, time: str, ratio_text: str) -> str:
    """One line of the table in records/README.md."""
    name = report.folder.name
    dated = _FOLDER_NAME.fullmatch(name)
    kind = f"run ({NOT_A_RECORD})" if report.kind == "run" else report.kind
    cells = [dated[1] if dated else "", f"[{dated[2] if dated else name}]({name}/)", kind, claim["hardware"],
             claim["data"], "" if target is None else f"{target:g}",
             f"{n} rungs" if report.kind == "ladder" else str(n), loss, p, time, ratio_text]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def draft_claim(folder) -> str:
    """A claim block for the folder's README.md, computed from its logs. Raises LogError when there are none."""
    folder = Path(folder).resolve()
    logs, problems = logs_in(folder)
    rungs = [] if not folder.is_dir() else rungs_of(folder)[0]
    if problems or not (logs or rungs):
        raise LogError(problems[0] if problems else f"{folder.name}: no log (*.txt) there")
    ladder = len(rungs) > 1 and len({rung.number for rung in rungs}) == len(rungs)
    first = rungs[0].logs[0] if ladder else logs[0] if logs else rungs[0].logs[0]
    prints = " + ".join(str(mark) for mark, _ in first.data_identity("val"))
    lines = [f"hardware: {first.hardware}", f"data: {UNNAMED}, val {prints}"]
    if ladder:
        target = first.target_loss
        lines = ["kind: ladder", f"n: {len(rungs)}", f"target: {target}", *lines]
        for rung in rungs:
            seconds = rung.seconds_to(target) if target is not None else None
            lines += [] if seconds is None else [f"rung_{rung.number}_s: {seconds:.1f}"]
            lines += [f"rung_{rung.number}_loss: {rung.val_loss:.4f}"]
    else:
        losses, times = [log.val_loss for log in logs], [log.train_time_s for log in logs]
        baseline = baseline_in(folder)[0]
        kind = "record" if len(logs) >= MIN_RECORD_RUNS and len(baseline) > 1 else "run"
        lines = [f"kind: {kind}", f"time_s: {mean(times):.2f}", f"val_loss: {mean(losses):.4f}", f"n: {len(logs)}",
                 *lines]
        if first.target_loss is not None:
            p = p_below(losses, first.target_loss)
            lines += [f"target: {first.target_loss}"] + ([] if math.isnan(p) else [f"p: {p:.2g}"])
        if baseline:
            lines.append(f"ratio: {ratio(times, [log.train_time_s for log in baseline])[0]:.4f}")
        if kind == "run":
            lines.append("```\nThis is a plain measurement, " + NOT_A_RECORD + ".")
    return "```claim\n" + "\n".join(lines) + ("" if "```" in lines[-1] else "\n```")


def record_folders(records: Path = RECORDS) -> list[Path]:
    """All folders <date>_<Name> of records/, oldest first."""
    return sorted(path for path in records.iterdir() if path.is_dir() and _FOLDER_NAME.fullmatch(path.name))


def summary(reports) -> str:
    """The table of records/README.md: one row for each folder that the checker accepts."""
    return "\n".join([TABLE_HEAD, *(report.row for report in reports if report.row and not report.refusals)])


def table_in(readme: str) -> str:
    """The table between the markers of records/README.md. Raises ClaimError when the markers are not there once."""
    if readme.count(TABLE_BEGIN) != 1 or readme.count(TABLE_END) != 1:
        raise ClaimError("records/README.md: the table's markers are not there exactly once")
    return readme.split(TABLE_BEGIN)[1].split(TABLE_END)[0].strip("\n")


def write_table(table: str) -> None:
    """Put the table between the markers of records/README.md. Raises ClaimError when they are not there once."""
    path = RECORDS / "README.md"
    text = path.read_text(encoding="utf-8")
    table_in(text)
    before, after = text.split(TABLE_BEGIN)[0], text.split(TABLE_END)[1]
    path.write_text(f"{before}{TABLE_BEGIN}\n{table}\n{TABLE_END}{after}", encoding="utf-8")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--draft", action="store_true", help="print a claim block computed from the logs")
    mode.add_argument("--summary", action="store_true", help="print the table of records/README.md")
    mode.add_argument("--write-table", action="store_true", help="put that table into records/README.md")
    options = parser.parse_args(argv)
    if options.write_table and options.folders:
        parser.error("--write-table is about all folders: name none")
    folders = [Path(folder) for folder in options.folders] or record_folders()
    try:
        if options.draft:
            print("\n\n".join(draft_claim(folder) for folder in folders))
            return 0
        reports = [check_folder(folder) for folder in folders]
        if options.write_table:
            write_table(summary(reports))
    except (LogError, ClaimError, NeedsScipy) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    short = options.summary or options.write_table
    for report in reports:
        if short:
            for line in report.refusals:
                print(f"{report.folder.name}: refused: {line}", file=sys.stderr)
        else:
            print(f"{report.folder.name} ({report.kind})")
            for line in report.lines + [f"note: {note}" for note in report.notes]:
                print(f"  {line}")
            for line in report.refusals:
                print(f"  refused: {line}")
    refused = sum(bool(report.refusals) for report in reports)
    print(summary(reports) if short else f"folders checked: {len(reports)}, refused: {refused}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
