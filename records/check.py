"""Checks record folders: recomputes every claim from the logs and refuses what the logs don't carry.

    python records/check.py                      all folders records/<date>_<Name>/
    python records/check.py FOLDER...            these folders
    python records/check.py --draft FOLDER...    print a claim block for its README.md, computed from the logs
    python records/check.py --summary [FOLDER..] print the table of records/README.md
    python records/check.py --write-table        put that table between the markers of records/README.md

A folder holds README.md and the logs (*.txt); logs of the baseline, run on the same machine in the same call,
lie in its baseline/ sub-folder. README.md carries one fenced block that opens with ```claim and holds TOML;
the keys are in CLAIM_KEYS. Each refusal is one line; any refusal makes the exit status 1 (2: wrong usage).

Statistics: p is the one-sided one-sample t-test that the mean validation loss is below the target. With the
target "baseline", the loss that the baseline's runs reach on average, it is Welch's test between the two sets
of runs. The ratio of mean times has a 95% Fieller interval with Welch's degrees of freedom.
"""

import argparse
import math
import re
import statistics
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation
from itertools import accumulate, groupby
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records.logs import Log, LogError, logs_in  # noqa: E402

RECORDS = ROOT / "records"
MAX_LOG_BYTES = 300_000
MAX_TIME_GAP = 0.001         # relative: how far the times that a log gives in several places may lie apart
MAX_P = 0.01
NOT_A_RECORD = "not a record claim"
UNNAMED = "NAME THE DATA SET"
EQUAL_LOSS = "baseline"      # in place of a target: the loss that the baseline's runs reach on average
# What a record needs beyond a plain run (records/README.md, Contract). Seeds 0 and 1 are for choosing.
MIN_RECORD_RUNS = 6
FIRST_RECORD_SEED = 10
RECORD_OVERRIDES = {"seed", "log_dir", "train_files", "val_files", "checkpoint_dir", "checkpoint_every_steps"}
MAX_TURN_RUNS = 2            # runs of one arm that may follow each other: a b b a is turn by turn
RUN_KEYS = {"kind", "time_s", "val_loss", "n", "hardware", "data"}
RECORD_KEYS = {"target", "p", "ratio", "parameters_dense", "parameters_tables"}
CLAIM_KEYS = {               # kind: (required keys, further allowed keys)
    "record": (RUN_KEYS | RECORD_KEYS, set()),
    "run": (RUN_KEYS, RECORD_KEYS),
    "ladder": ({"kind", "n", "target", "hardware", "data"}, {"rung_<number>_s", "rung_<number>_loss"}),
}
TABLE_BEGIN, TABLE_END = "<!-- table: written by check.py -->", "<!-- end of table -->"
TABLE_HEAD = ("| date | folder | kind | hardware | data | target | n | val loss (sd) | p | seconds (sd) | "
              "ratio to baseline [95%] |\n|---|---|---|---|---|---|---|---|---|---|---|")
_FOLDER_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_(.+)")
_CLAIM_BLOCK = re.compile(r"^```claim[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


class NeedsScipy(Exception):
    """scipy is not installed; the message says how to get it."""


class ClaimError(Exception):
    """One readable line about a README whose claim can't be read."""


@dataclass
class Report:
    """What the check of one folder found. `refusals` empty: the logs carry the claim. `row`: its line in the
    table."""
    folder: Path
    kind: str = "?"
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    row: str = ""


# ------------------------------------------------------------------------------------------------ statistics

def mean(values) -> float:
    """Arithmetic mean; NaN for nothing."""
    return statistics.fmean(values) if values else math.nan


def deviation(values) -> float:
    """Sample standard deviation (n - 1); NaN for fewer than two values or values that are not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def _scipy_stats():
    try:
        from scipy import stats
    except ImportError:
        raise NeedsScipy("needs scipy: pip install -r requirements-dev.txt") from None
    return stats


def p_below(losses, target: float) -> float:
    """One-sided p that the mean of `losses` is below `target`; NaN for fewer than two finite losses or equal
    ones."""
    if not deviation(losses) > 0:
        return math.nan
    return float(_scipy_stats().ttest_1samp(losses, target, alternative="less").pvalue)


def _have_spread(a, b) -> bool:
    """Whether both sides have two finite values or more, and at least one of them a spread."""
    return deviation(a) + deviation(b) > 0                   # a NaN is not more than 0


def p_less(a, b) -> float:
    """One-sided p of Welch's test that mean(a) is below mean(b); NaN where a side has too few values or both
    have no spread."""
    if not _have_spread(a, b):
        return math.nan
    return float(_scipy_stats().ttest_ind(a, b, equal_var=False, alternative="less").pvalue)


def difference(a, b) -> tuple[float, float, float]:
    """(mean(b) - mean(a), low, high) with Welch's 95% interval; low and high are NaN for fewer than two
    values a side or values that are not finite."""
    delta = mean(b) - mean(a)
    if _have_spread(a, b):
        low, high = _scipy_stats().ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
        return delta, float(low), float(high)
    edge = math.nan if math.isnan(deviation(a) + deviation(b)) else delta
    return delta, edge, edge


def ratio(a, b) -> tuple[float, float, float]:
    """(mean(a) / mean(b), low, high) with Fieller's 95% interval, for positive values. low and high are NaN
    for fewer than two values a side or values that are not finite; high is infinite when mean(b) can't be
    told from zero."""
    top, bottom = mean(a), mean(b)
    point = top / bottom if bottom else math.nan
    if not _have_spread(a, b):
        edge = math.nan if math.isnan(deviation(a) + deviation(b)) else point
        return point, edge, edge
    stats = _scipy_stats()
    freedom = stats.ttest_ind(a, [point * value for value in b], equal_var=False).df
    t_squared = float(stats.t.ppf(0.975, freedom)) ** 2
    # All r with (top - r bottom)^2 <= t^2 (var_top + r^2 var_bottom), variances of the means: quadratic in r.
    square = bottom ** 2 - t_squared * deviation(b) ** 2 / len(b)
    constant = top ** 2 - t_squared * deviation(a) ** 2 / len(a)
    if square <= 0:
        return point, 0.0, math.inf
    root = math.sqrt(max(0.0, (top * bottom) ** 2 - square * constant))
    return point, (top * bottom - root) / square, (top * bottom + root) / square


def format_interval(low: float, high: float, digits: int = 3) -> str:
    if math.isnan(low):
        return "[no interval: needs 2 runs a side]"
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


# ------------------------------------------------------------------------------------------- what logs carry

def log_refusals(log: Log, kind: str) -> list[str]:
    """What is wrong with one log for a claim of this kind."""
    found = []
    if log.size_bytes > MAX_LOG_BYTES:
        found.append(f"{log.size_bytes:,} bytes, more than {MAX_LOG_BYTES:,}")
    if not log.sha_matches:
        found.append(f"the embedded source has sha256 {log.source_sha256[:12]}, its header says "
                     f"{str(log.header['source_sha256'])[:12]}")
    if log.resumed:
        found.append("the run was resumed from a checkpoint")
    if kind == "record":
        found += _record_log_refusals(log)
    fault = _end_refusal(log, kind)
    found += [fault] if fault else _agreement_refusals(log)
    return [f"{log.path.name}: {line}" for line in found]


def _record_log_refusals(log: Log) -> list[str]:
    """What a log of a record claim, or of its baseline, must show beyond that of a plain run."""
    found = []
    overrides = log.header["overrides"].items()
    given = [f"--{key}={value}" for key, value in overrides if key not in RECORD_OVERRIDES]
    if given:
        found.append(f"overridden by hand ({' '.join(given)}); a record's numbers stand in its source")
    if log.seed < FIRST_RECORD_SEED:
        found.append(f"seed {log.seed}: a record counts seeds from {FIRST_RECORD_SEED} on, choose on those "
                     "below")
    if None in parameters_of(log):
        found.append("its header does not list the parameters (total, and matmul: those in dense matrices)")
    return found


def parameters_of(log: Log) -> tuple[int | None, int | None]:
    """Numbers of parameters (in dense matrices, which multiply activations; all others, nearly all of them
    rows of tables that are looked up). None where the header doesn't say."""
    listed = log.header.get("parameters") or {}
    total, dense = listed.get("total"), listed.get("matmul")
    if not isinstance(total, int) or not isinstance(dense, int):
        return None, None
    return dense, total - dense


def _end_refusal(log: Log, kind: str) -> str | None:
    """Why the end of this run doesn't count; None for a whole run with finite losses."""
    result = log.result
    if result is None:
        return "no result line: the run was cut short, or still runs"
    bad = [point.step for point in log.validation + log.training if not math.isfinite(point.loss)]
    if bad:
        return f"a loss is not finite (step {min(bad)})"
    if result["status"] == "non_finite" or not math.isfinite(log.val_loss):
        return "a loss is not finite"
    if not (math.isfinite(log.train_time_s) and log.train_time_s > 0):
        return f"its training time is {log.train_time_s} s"
    if log.finished:
        return None
    place = f"step {result['step']}/{result['num_steps']}"
    if result["status"] != "target_reached":
        return f"incomplete ({result['status']} at {place})"
    if kind != "run":
        return f"stopped when it saw its target ({place}): a loss chosen by looking proves nothing"
    return None


def _agreement_refusals(log: Log) -> list[str]:
    """Where the result of a run contradicts its step lines, its step times or its configuration."""
    found, steps = [], log.result["step"]
    last = log.validation[-1] if log.validation else None
    if last is None or last.step != steps:
        return [f"no validation line at its last step {steps}"]
    if abs(last.loss - log.val_loss) > 0.00011:              # the line has four digits
        found.append(f"result says val_loss {log.val_loss:.4f}, its last validation line {last.loss:.4f}")
    if not abs(last.seconds - log.train_time_s) <= 0.0021:   # the line has whole milliseconds
        found.append(f"result says {log.train_time_s:.3f} s, its last validation line {last.seconds:.3f} s")
    wanted = log.config.get("val_tokens")
    if wanted and log.val_tokens != wanted:
        found.append(f"validated on {log.val_tokens} tokens, its configuration says {wanted}")
    if len(log.step_times_ms) != steps:
        return found + [f"it holds {len(log.step_times_ms)} step times for {steps} steps"]
    return found + _time_refusals(log, [0.0, *accumulate(log.step_times_ms)])


def _time_refusals(log: Log, elapsed_ms: list[float]) -> list[str]:
    """Where a time in the log is not the sum of its step times; elapsed_ms: that sum after each step. A
    training line is written one step late, so its time may lie anywhere within the step after it."""
    steps, total_ms = len(elapsed_ms) - 1, 1000 * log.train_time_s
    claims = [("the result's train_time", total_ms, steps, steps)]
    if log.result.get("step_avg_ms") is not None:
        average_ms = log.result["step_avg_ms"]
        claims.append(("the result's step_avg times its steps", steps * average_ms, steps, steps))
    for step, ms in ((point.step, 1000 * point.seconds) for point in log.validation):
        claims.append((f"the validation line of step {step}", ms, step, step))
    for step, ms in ((point.step, 1000 * point.seconds) for point in log.training):
        claims.append((f"the training line of step {step}", ms, step, step + 1))
    for what, said_ms, first, last in claims:
        low_ms, high_ms = elapsed_ms[min(first, steps)], elapsed_ms[min(last, steps)]
        slack_ms = 1 + MAX_TIME_GAP * high_ms                # 1: lines have whole milliseconds
        if not low_ms - slack_ms <= said_ms <= high_ms + slack_ms:
            return [f"{what} says {said_ms / 1000:.3f} s, its step times add up to {low_ms / 1000:.3f} s"]
    return []


def twice_refusals(logs) -> list[str]:
    """Logs that show one run twice: by run id, or by the same measured lines under another name."""
    found, pairs = [], set()
    for what, key_of in (("run_id", lambda log: log.run_id),
                         ("step lines and times", lambda log: log.measured_sha256)):
        seen = {}
        for log in logs:
            first = seen.setdefault(key_of(log), log)
            pair = (first.path, log.path)
            if first is not log and key_of(log) is not None and pair not in pairs:
                pairs.add(pair)
                names = f"{first.path.name} and {log.path.name}"
                found.append(f"one run counted twice: {names} have the same {what}")
    return found


def same_refusals(logs, where: str) -> list[str]:
    """Where runs that are averaged or compared differ in data, validation tokens or hardware."""
    found = []
    for what, value_of in (("training data", lambda log: log.data_identity("train")),
                           ("validation data", lambda log: log.data_identity("val")),
                           ("validation tokens", lambda log: log.val_tokens),
                           ("hardware", lambda log: log.hardware)):
        names = {value_of(log): log.path.name for log in logs}
        if len(names) > 1:
            shown = ", ".join(f"{name} {_shown(value)}" for value, name in list(names.items())[:3])
            found.append(f"different {what} {where}: {shown}")
    return found


def _shown(value) -> str:
    """A data identity, token count or hardware name in few characters."""
    if not isinstance(value, tuple):
        return str(value)
    return "+".join(str(mark) for mark, _ in value[:2]) or "none"


def mixed_refusals(logs, name: str) -> list[str]:
    """Where runs of one arm did not run one recipe."""
    sources = Counter(log.source_sha256[:12] for log in logs)
    if len(sources) > 1:
        shown = ", ".join(f"{sha} in {count}" for sha, count in sources.items())
        return [f"mixed sources in {name}: {shown} logs"]
    if len({log.recipe for log in logs}) > 1:
        keys = sorted({key for log in logs for key in log.config} - {"seed"})
        mixed = [key for key in keys if len({str(log.config.get(key)) for log in logs}) > 1]
        return [f"mixed configurations in {name}: runs differ in {', '.join(mixed)}"]
    seeds = Counter(str(log.seed) for log in logs)
    return [f"seed {seed} counts {count} times in {name}: n counts seeds"
            for seed, count in seeds.items() if count > 1]


def turn_refusals(logs, baseline) -> list[str]:
    """Where the headers show that the two arms did not take turns on one machine and installation."""
    found = []
    versions = logs[0].header["versions"]
    for log in logs + baseline:
        differing = [key for key, value in log.header["versions"].items() if versions.get(key) != value]
        if differing:
            key = differing[0]
            found.append(f"{log.path.name}: its {key} is {log.header['versions'][key]}, "
                         f"that of {logs[0].path.name} {versions.get(key)}")
    starts = [(str(log.header.get("started")), "the idea") for log in logs]
    starts += [(str(log.header.get("started")), "the baseline") for log in baseline]
    for arm, runs in groupby(sorted(starts), key=lambda start: start[1]):
        times = [time for time, _ in runs]
        if len(times) > MAX_TURN_RUNS:
            found.append(f"not turn by turn: {arm} started {len(times)} times in succession, {times[0]} to "
                         f"{times[-1]}")
    return found


def describe_arm(logs, name: str = "runs") -> list[str]:
    """Readable lines about the runs of one arm: what they are, their losses with p, their times."""
    first, losses, times = logs[0], [log.val_loss for log in logs], [log.train_time_s for log in logs]
    seeds = ",".join(str(log.seed) for log in sorted(logs, key=lambda log: log.seed))
    goal = loss_spread = time_spread = ""
    if first.target_loss is not None:
        p = p_below(losses, first.target_loss)
        shown = "p needs 2 different runs" if math.isnan(p) else f"one-sided p {p:.2g}"
        goal = f"; target {first.target_loss}, {shown}"
    if len(logs) > 1:
        loss_spread = f", sd {deviation(losses):.4f}, {min(losses):.4f} to {max(losses):.4f}"
        time_spread = f", sd {deviation(times):.2f}, {min(times):.2f} to {max(times):.2f}"
    prints = "+".join(str(mark) for mark, _ in first.data_identity("val"))
    torch = first.header["versions"].get("torch", "?")
    sha = first.source_sha256[:12]
    lines = [f"{name}: n {len(logs)}, seeds {seeds}, source {sha}, {first.hardware}, torch {torch}",
             f"  validation loss: mean {mean(losses):.4f}{loss_spread}{goal} ({first.val_tokens} tokens of "
             f"{prints})",
             f"  training time: mean {mean(times):.2f} s{time_spread}"]
    dense, tables = parameters_of(first)
    if dense is not None:
        lines.append(f"  parameters: {dense:,} in dense matrices, {tables:,} in tables")
    return lines


def arm_notes(logs) -> list[str]:
    """What a reader should know and the checker does not refuse."""
    notes, seeds = [], sorted({log.seed for log in logs})
    missing = sorted(set(range(seeds[0], seeds[-1])) - set(seeds)) if seeds[-1] - seeds[0] < 1000 else []
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
    if hours <= 24:
        return []
    return [f"runs and baseline span {hours:.0f} hours: was this one call on one machine?"]


# ------------------------------------------------------------------------------------ what the README claims

def read_claim(folder: Path) -> dict:
    """The README's claim block, numbers as int or Decimal. Raises ClaimError: no README, no block or several,
    no TOML, unknown or lacking keys."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ClaimError("no readable README.md") from None
    blocks = _CLAIM_BLOCK.findall(text)
    if len(blocks) != 1:
        raise ClaimError(f"README.md has {len(blocks)} blocks fenced with ```claim, it needs one "
                         "(--draft prints it)")
    try:
        claim = tomllib.loads(blocks[0], parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise ClaimError(f"README.md: the claim block is no TOML: {error}") from None
    if claim.get("kind") not in [*CLAIM_KEYS]:
        kind = claim.get("kind", "missing")
        raise ClaimError(f"README.md: kind is {kind}, not one of {', '.join(CLAIM_KEYS)}")
    required, optional = CLAIM_KEYS[claim["kind"]]
    wrong = [f"lacks {key}" for key in sorted(required - claim.keys())]
    wrong += [f"has unknown {key}" for key in claim
              if re.sub(r"\d+", "<number>", key) not in required | optional]
    if wrong:
        raise ClaimError(f"README.md: claim {', '.join(wrong)}")
    if claim["kind"] == "run" and NOT_A_RECORD not in text:
        raise ClaimError(f"README.md of a plain run must say that it is {NOT_A_RECORD}")
    return claim


def better_than_logs(key: str, claimed, measured: float) -> str | None:
    """A refusal if the claimed number (lower is better) is below what the logs say, beyond its own rounding:
    half a unit of its last digit, and never more than 0.5 s, 0.0005 of loss, 0.005 of ratio, 5% of p. A text
    "<0.01" claims that the measured number is smaller."""
    is_bound = isinstance(claimed, str) and claimed.startswith("<")
    try:
        number = claimed[1:].strip() if is_bound else claimed
        value = Decimal("nan" if not is_bound and _float_of(claimed) is None else number)
    except InvalidOperation:
        value = Decimal("nan")
    said = str(claimed).lower()                              # Decimal writes 1E-9
    if not value.is_finite():
        return f"README.md: {key} is {said}, not a number"
    most = {"loss": 0.0005, "ratio": 0.005, "p": 0.05 * measured}.get(key.rsplit("_", 1)[-1], 0.5)
    slack = min(0.5 * 10.0 ** value.as_tuple().exponent, most) * (1 + 1e-9)
    if is_bound:
        holds = measured < float(value)                      # of a Decimal, NaN would be an error
    else:
        holds = float(value) >= measured - slack             # false when the logs say nothing: NaN
    shown = "nothing" if math.isnan(measured) else f"{measured:.6g}"
    return None if holds else f"README.md says better than the logs: {key} {said}, the logs say {shown}"


def _exact_refusals(claim: dict, logs) -> list[str]:
    """Where n, hardware, parameters or the data's fingerprint in the claim are not those of the logs."""
    found, n = [], claim["n"]
    if n != len(logs):
        is_better = isinstance(n, int) and n > len(logs)
        found.append(f"README.md says {'better than the logs: ' if is_better else ''}n {n}, the folder holds "
                     f"{len(logs)}")
    if claim["hardware"] != logs[0].hardware:
        found.append(f"README.md says hardware {claim['hardware']}, the logs say {logs[0].hardware}")
    for key, count in zip(("parameters_dense", "parameters_tables"), parameters_of(logs[0])):
        if claim.get(key, count) != count:
            found.append(f"README.md says {key} {claim[key]}, the logs say {count}")
    data = str(claim["data"])
    if UNNAMED in data:
        found.append("README.md: name the data set in the claim's data")
    for mark, _ in logs[0].data_identity("val"):
        if str(mark) not in data:
            found.append(f"README.md's data ({data}) does not name the validation fingerprint {mark}")
    return found


# --------------------------------------------------------------------------------------------------- folders

def check_folder(folder) -> Report:
    """Check one folder; never raises for what it finds there."""
    folder = Path(folder).resolve()
    report, claim = Report(folder), None
    if not folder.is_dir():
        report.refusals.append("no such folder")
        return report
    try:
        claim = read_claim(folder)
        report.kind = claim["kind"]
    except ClaimError as error:
        report.refusals.append(str(error))
    logs, problems = logs_in(folder)
    baseline, baseline_problems = baseline_in(folder)
    report.refusals += problems + [f"baseline: {problem}" for problem in baseline_problems]
    if not logs:
        report.refusals += [] if problems else ["no log (*.txt) of a run"]
        return report
    for log in logs:
        report.refusals += log_refusals(log, report.kind)
    report.refusals += twice_refusals(logs + baseline)
    differing = same_refusals(logs, "between the runs")
    report.refusals += differing or same_refusals(logs + baseline, "between runs and baseline")
    report.notes += arm_notes(logs)
    if claim:
        report.refusals += _exact_refusals(claim, logs)
    if report.kind == "ladder":
        _check_ladder(report, claim, logs)
    else:
        _check_runs(report, claim, logs, baseline)
    return report


def baseline_in(folder: Path) -> tuple[list[Log], list[str]]:
    """logs_in of the folder's baseline/, empty where there is none."""
    return logs_in(folder / "baseline") if (folder / "baseline").is_dir() else ([], [])


def _check_runs(report: Report, claim: dict | None, logs, baseline) -> None:
    """Fill the report of a record or a plain run with what its arms say."""
    claim, refuse = claim or {}, report.refusals.extend
    refuse(mixed_refusals(logs, "the runs"))
    losses, times = [log.val_loss for log in logs], [log.train_time_s for log in logs]
    point, low, high = math.nan, math.nan, math.nan
    report.lines += describe_arm(logs)
    if baseline:
        for log in baseline:
            refuse(f"baseline: {line}" for line in log_refusals(log, report.kind))
        refuse(mixed_refusals(baseline, "the baseline"))
        point, low, high = ratio(times, [log.train_time_s for log in baseline])
        report.lines += describe_arm(baseline, "baseline")
        interval = format_interval(low, high, 4)
        report.lines.append(f"ratio of mean times to the baseline: {point:.4f} {interval} (95%, Fieller with "
                            "Welch's degrees of freedom)")
        surplus, surely, _ = difference([log.val_loss for log in baseline], losses)
        if surely > 0:
            report.notes.append(f"the baseline's loss is lower by {surplus:.4f}: that surplus is part of the "
                                "ratio")
        report.notes += _span_notes(logs + baseline) + [f"baseline: {note}" for note in arm_notes(baseline)]
    if claim.get("target") == EQUAL_LOSS:
        target, p = EQUAL_LOSS, p_less(losses, [log.val_loss for log in baseline])
    else:
        target = logs[0].target_loss
        p = math.nan if target is None else p_below(losses, target)
    if report.kind == "record":
        refuse(_record_refusals(target, logs, baseline, p, high))
    measured = dict(time_s=mean(times), val_loss=mean(losses), p=p, ratio=point)
    for key, value in measured.items():
        refuse(filter(None, [better_than_logs(key, claim[key], value)] if key in claim else []))
    if "target" in claim and target != EQUAL_LOSS and _float_of(claim["target"]) != target:
        refuse([f"README.md says target {claim['target']}, the logs' configuration says {target}"])
    if claim:
        shown_p = "" if math.isnan(p) else f"{p:.2g}"
        shown_ratio = "" if math.isnan(point) else f"{point:.4f}"
        shown_ratio += "" if math.isnan(low) else f" {format_interval(low, high, 4)}"
        report.row = _row(report, claim, target, str(len(logs)), _mean_and_spread(losses, 4), shown_p,
                          _mean_and_spread(times, 2), shown_ratio)


def _float_of(claimed) -> float | None:
    """A claimed number as a float; None for anything else."""
    is_number = isinstance(claimed, (int, Decimal)) and not isinstance(claimed, bool)
    return float(claimed) if is_number else None


def _mean_and_spread(values, digits: int) -> str:
    spread = f" ({deviation(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _record_refusals(target, logs, baseline, p: float, ratio_high: float) -> list[str]:
    """What a record needs beyond sound logs: enough runs, a significant loss, a faster time than its
    baseline, and arms that took turns."""
    found = []
    if len(logs) < MIN_RECORD_RUNS:
        count = "a single run" if len(logs) == 1 else f"{len(logs)} runs"
        found.append(f"{count}: a record needs n >= {MIN_RECORD_RUNS} for its p")
    if target is None:
        found.append("the logs' configuration has no target_loss")
    elif len(logs) > 1 and not p < MAX_P:
        why = "the losses are all equal" if math.isnan(p) else f"one-sided p is {p:.2g}"
        goal = "the mean of its baseline" if target == EQUAL_LOSS else f"the target {target}"
        found.append(f"mean loss is not below {goal} with p < {MAX_P}: {why}")
    needed = MIN_RECORD_RUNS if target == EQUAL_LOSS else 2
    if len(baseline) < needed:
        purpose = "the target" if target == EQUAL_LOSS else "the ratio"
        found.append(f"{len(baseline)} logs in baseline/: {purpose} needs at least {needed} from the same "
                     "machine and call")
    elif not ratio_high < 1:
        found.append(f"not faster than its baseline: the ratio's interval reaches {ratio_high:.4f}")
    if baseline:
        found += turn_refusals(logs, baseline)
        if baseline[0].recipe == logs[0].recipe:
            found.append("runs and baseline ran the same source and configuration")
    return found


def _check_ladder(report: Report, claim: dict, logs) -> None:
    """Fill the report of the ladder: one file <number>_<title>.txt for each step of one history, all of one
    budget. It is closed: nothing is added to it, and no tool draws it again."""
    for what, value_of in (("tokens trained", lambda log: (log.result or {}).get("tokens_trained")),
                           ("batch_tokens", lambda log: log.config.get("batch_tokens"))):
        values = {str(value_of(log)): log.path.name for log in logs}
        if len(values) > 1:
            report.refusals.append(f"different {what} between the rungs: " + ", ".join(
                f"{name} {value}" for value, name in values.items()))
    if len({log.recipe for log in logs}) < len(logs):
        report.refusals.append("two rungs ran the same source and configuration")
    target, measured, shown = _float_of(claim["target"]), {}, []
    if target is None:
        report.refusals.append(f"README.md: target is {claim['target']}, not a number")
        return
    for log in logs:
        number, seconds = log.path.stem.partition("_")[0], log.seconds_to(target)
        measured[f"rung_{number}_loss"] = log.val_loss
        measured[f"rung_{number}_s"] = math.nan if seconds is None else seconds
        shown.append("-" if seconds is None else f"{seconds:.1f}")
        report.lines.append(f"{log.path.stem}: loss {log.val_loss:.4f}, seconds to {target}: {shown[-1]}, "
                            f"source {log.source_sha256[:12]}")
    for key in claim:
        if key.startswith("rung_"):
            report.refusals += filter(None, [better_than_logs(key, claim[key], measured.get(key, math.nan))])
    losses, seconds = f"{logs[0].val_loss:.4f} > {logs[-1].val_loss:.4f}", " > ".join(shown) + " to target"
    report.row = _row(report, claim, target, f"{len(logs)} rungs", losses, "", seconds, "")


def _row(report: Report, claim: dict, target, n: str, loss: str, p: str, time: str, ratio_text: str) -> str:
    """One line of the table in records/README.md."""
    name = report.folder.name
    dated = _FOLDER_NAME.fullmatch(name)
    date, title = dated.groups() if dated else ("", name)
    kind = f"run ({NOT_A_RECORD})" if report.kind == "run" else report.kind
    shown_target = f"{target:g}" if isinstance(target, float) else target or ""
    cells = [date, f"[{title}]({quote(name)}/)", kind, claim["hardware"], claim["data"], shown_target, n, loss, p,
             time, ratio_text]
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def draft_claim(folder) -> str:
    """A claim block for the folder's README.md, computed from its logs. Raises LogError when there are
    none."""
    folder = Path(folder).resolve()
    logs, problems = logs_in(folder)
    if problems or not logs:
        raise LogError(problems[0] if problems else f"{folder.name}: no log (*.txt) there")
    baseline = baseline_in(folder)[0]
    losses, times = [log.val_loss for log in logs], [log.train_time_s for log in logs]
    target = logs[0].target_loss
    prints = " + ".join(str(mark) for mark, _ in logs[0].data_identity("val"))
    is_record = len(logs) >= MIN_RECORD_RUNS and len(baseline) > 1
    lines = [f'kind = "{"record" if is_record else "run"}"', f"time_s = {mean(times):.2f}",
             f"val_loss = {mean(losses):.4f}", f"n = {len(logs)}", f'hardware = "{logs[0].hardware}"',
             f'data = "{UNNAMED}, val {prints}"']
    p = math.nan
    if target is not None:
        lines.append(f"target = {target}")
        p = p_below(losses, target)
    elif is_record:
        lines.append(f'target = "{EQUAL_LOSS}"')
        p = p_less(losses, [log.val_loss for log in baseline])
    if not math.isnan(p):
        lines.append(f"p = {p:.2g}")
    if baseline:
        lines.append(f"ratio = {ratio(times, [log.train_time_s for log in baseline])[0]:.4f}")
    dense, tables = parameters_of(logs[0])
    if dense is not None:
        lines += [f"parameters_dense = {dense}", f"parameters_tables = {tables}"]
    block = "```claim\n" + "\n".join(lines) + "\n```"
    return block if is_record else f"{block}\nThis is a plain measurement, {NOT_A_RECORD}."


def record_folders(records: Path = RECORDS) -> list[Path]:
    """All folders <date>_<Name> of records/, oldest first."""
    return sorted(path for path in records.iterdir() if path.is_dir() and _FOLDER_NAME.fullmatch(path.name))


def summary(reports) -> str:
    """The table of records/README.md: one row for each folder that the checker accepts."""
    return "\n".join([TABLE_HEAD, *(report.row for report in reports if report.row and not report.refusals)])


def around_table(readme: str) -> tuple[str, str, str]:
    """(text before, table, text after) of records/README.md. Raises ClaimError when a marker is not there
    once."""
    if readme.count(TABLE_BEGIN) != 1 or readme.count(TABLE_END) != 1:
        raise ClaimError("records/README.md: the table's markers are not there exactly once")
    before, rest = readme.split(TABLE_BEGIN)
    table, after = rest.split(TABLE_END)
    return before, table.strip("\n"), after


def write_table(table: str) -> None:
    """Put the table between the markers of records/README.md. Raises ClaimError when they are not there
    once."""
    path = RECORDS / "README.md"
    before, _, after = around_table(path.read_text(encoding="utf-8"))
    path.write_text(f"{before}{TABLE_BEGIN}\n{table}\n{TABLE_END}{after}", encoding="utf-8")


def print_report(report: Report) -> None:
    print(f"{report.folder.name} ({report.kind})")
    for line in report.lines + [f"note: {note}" for note in report.notes]:
        print(f"  {line}")
    for line in report.refusals:
        print(f"  refused: {line}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
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
    refused = sum(bool(report.refusals) for report in reports)
    if options.summary or options.write_table:
        for report in reports:
            for line in report.refusals:
                print(f"{report.folder.name}: refused: {line}", file=sys.stderr)
        print(summary(reports))
    else:
        for report in reports:
            print_report(report)
        print(f"folders checked: {len(reports)}, refused: {refused}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
