"""Compares two runs or two sets of runs: the tool of every day.

    python records/compare.py A B          A and B: logs, folders of logs, or scripts (*.py: rooms only)
    python records/compare.py A B --diff   also print the changed lines, room by room

Says which rooms of the script differ and by how many lines, which configuration values differ, and how B
differs from A in loss (at equal steps and at equal timed seconds), step time, memory. Every difference is B
minus A; intervals are 95% (Welch), and are there when both sides have two runs or more.
"""

import argparse
import difflib
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from records import check  # noqa: E402
from records.logs import HARMLESS_OVERRIDES, Log, LogError, logs_in, rooms_of  # noqa: E402

NUM_TIMES = 5   # at how many equal times the losses are compared


def read_side(place: str) -> tuple[str, list[Log]]:
    """(source, logs) of a log, a folder's own logs, or a script (no logs). Raises LogError."""
    path = Path(place)
    if path.suffix == ".py":
        try:
            return path.read_text(encoding="utf-8"), []
        except (OSError, UnicodeDecodeError):
            raise LogError(f"{place}: can't be read as a script") from None
    logs, problems = logs_in(path)
    if problems or not logs:
        raise LogError(problems[0] if problems else f"{place}: no log (*.txt) there")
    if len({log.source_sha256 for log in logs}) > 1:
        raise LogError(f"{place}: its logs embed different sources; compare one of them at a time")
    return logs[0].source.decode("utf-8"), logs


def compare_rooms(source_a: str, source_b: str, show_lines: bool = False) -> list[str]:
    """One line for each room that differs, with lines added and removed; then the changed lines if asked
    for."""
    if source_a == source_b:
        return ["source: the same"]
    rooms_a, rooms_b = rooms_of(source_a), rooms_of(source_b)
    found, total, rooms = [], [0, 0], 0
    for key in [*rooms_a, *(key for key in rooms_b if key not in rooms_a)]:
        title_a, lines_a = rooms_a.get(key, (None, []))
        title_b, lines_b = rooms_b.get(key, (None, []))
        if lines_a == lines_b:
            continue
        # The first two lines of a unified diff are file names; a changed line may itself begin with --.
        changed = [line for line in list(difflib.unified_diff(lines_a, lines_b, lineterm="", n=0))[2:]
                   if line[0] in "+-"]
        plus = sum(line.startswith("+") for line in changed)
        minus = len(changed) - plus
        total[0] += plus
        total[1] += minus
        rooms += 1
        name = f"{key}. {title_b or title_a}" if key else title_b or title_a
        if title_a is None:
            name += " (only in B)"
        elif title_b is None:
            name += " (only in A)"
        elif title_a != title_b:
            name += f" (was {title_a})"
        found.append(f"  {name}: +{plus} -{minus}")
        if show_lines:
            found += [f"      {line}" for line in changed]
    count = "1 room differs" if rooms == 1 else f"{rooms} rooms differ"
    return [f"source: {count}, +{total[0]} -{total[1]} lines "
            f"({len(source_a.splitlines())} -> {len(source_b.splitlines())})", *found]


def compare_configs(a: Log, b: Log) -> list[str]:
    """One line for each configuration value that differs, and for what else must be equal for a fair
    comparison."""
    lines = []
    for key in sorted(a.config.keys() | b.config.keys()):
        left, right = a.config.get(key, "(absent)"), b.config.get(key, "(absent)")
        if left != right and key not in HARMLESS_OVERRIDES:
            lines.append(f"  {key}: {left} -> {right}")
    head = f"configuration: values that differ: {len(lines)}" if lines else "configuration: the same"
    lines = [head, *lines]
    versions_a, versions_b = a.header["versions"], b.header["versions"]
    for key in sorted(versions_a.keys() | versions_b.keys()):
        if versions_a.get(key) != versions_b.get(key):
            lines.append(f"note: {key} {versions_a.get(key)} -> {versions_b.get(key)}")
    return lines + [f"note: {line}" for line in check.same_refusals([a, b], "between A and B")]


def loss_at(log: Log, seconds: float) -> float:
    """Validation loss after so many timed seconds, linear between two validations; NaN outside of them."""
    for before, after in zip(log.validation, log.validation[1:], strict=False):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / max(after.seconds - before.seconds, 1e-9)
            return before.loss + share * (after.loss - before.loss)
    return math.nan


def _difference_line(what: str, a: list[float], b: list[float], digits: int = 4, unit: str = "") -> str:
    """'what: mean A -> mean B, difference [interval]'."""
    delta, low, high = check.difference(a, b)
    interval = "" if math.isnan(low) else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    means = f"{check.mean(a):.{digits}f} -> {check.mean(b):.{digits}f}"
    return f"{what}: {means}{unit}, {delta:+.{digits}f}{interval}"


def compare_losses(a: list[Log], b: list[Log]) -> list[str]:
    """Loss differences at the steps that all runs validated, at equal times, and times to the target."""
    lines = [f"validation loss, {len(a)} runs -> {len(b)} runs"
             + ("" if min(len(a), len(b)) > 1 else " (no interval: needs 2 runs a side)")]
    losses = [{point.step: point.loss for point in log.validation} for log in a + b]
    if not all(losses):
        return [*lines, "  a run has no validation yet"]
    for log, at in zip(a + b, losses, strict=True):
        if log.finished and math.isfinite(log.val_loss):
            at[log.result["step"]] = log.val_loss   # full precision at the end
    steps = sorted(set.intersection(*map(set, losses)))
    lines.append("  at equal steps" if steps else "  no step was validated by all runs")
    lines += [_difference_line(f"    step {step}", [at[step] for at in losses[:len(a)]],
                               [at[step] for at in losses[len(a):]]) for step in steps]
    if all(log.finished for log in a + b):
        ends = [f"{side[0].result['step']}" for side in (a, b)]
        lines.append(_difference_line(f"  at the end (step {' -> '.join(ends)})", [log.val_loss for log in a],
                                      [log.val_loss for log in b]))
    # Before the second validation the curve bends too much for a straight line to say anything.
    start = max(log.validation[:2][-1].seconds for log in a + b)
    end = min(log.validation[-1].seconds for log in a + b)
    if end > start:
        lines.append("  at equal timed seconds (linear between validations)")
        for i in range(NUM_TIMES):
            seconds = min(end, start + (end - start) * i / (NUM_TIMES - 1))      # the sum may round up
            lines.append(_difference_line(f"    {seconds:.1f} s", [loss_at(log, seconds) for log in a],
                                          [loss_at(log, seconds) for log in b]))
    else:
        lines.append("  no stretch of time that all runs validated twice: nothing at equal seconds")
    if a[0].target_loss is not None and a[0].target_loss == b[0].target_loss:
        target = a[0].target_loss
        reached = [[log.seconds_to(target) for log in side] for side in (a, b)]
        if None not in reached[0] + reached[1]:
            what = f"  seconds to {target} (interpolated)"
            lines.append(_difference_line(what, *reached, digits=2, unit=" s"))
        else:
            counts = [f"{sum(value is not None for value in side)} of {len(side)}" for side in reached]
            lines.append(f"  runs that pass {target}: {counts[0]} -> {counts[1]}")
    return lines


def compare_costs(a: list[Log], b: list[Log]) -> list[str]:
    """Differences of whole training time, step time and memory."""
    lines = []
    if all(log.result for log in a + b):
        times = [[log.train_time_s for log in side] for side in (a, b)]
        lines.append(_difference_line("training time", *times, digits=2, unit=" s"))
        point, low, high = check.ratio(times[1], times[0])
        interval = "" if math.isnan(low) else f" [{low:.4f}, {high:.4f}] (Fieller)"
        lines.append(f"  ratio B / A {point:.4f}{interval}")
    if all(log.step_times_ms for log in a + b):
        for what, of_steps in (("mean step", statistics.fmean), ("median step", statistics.median)):
            lines.append(_difference_line(what, [of_steps(log.step_times_ms) for log in a],
                                          [of_steps(log.step_times_ms) for log in b], digits=2, unit=" ms"))
        lines.append("slow steps a run: " + " -> ".join(
            f"{check.mean([len(log.slow_steps) for log in side]):.1f}" for side in (a, b)))
    for key, digits, unit in (("peak_memory_mib", 0, " MiB"), ("time_to_first_step_s", 1, " s")):
        values = [[log.result.get(key) for log in side if log.result] for side in (a, b)]
        if all(side and None not in side for side in values):
            lines.append(_difference_line(key, *values, digits=digits, unit=unit))
    return lines


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--diff", action="store_true", help="print the changed lines")
    options = parser.parse_args(argv)
    try:
        (source_a, a), (source_b, b) = read_side(options.a), read_side(options.b)
        lines = [f"A = {options.a}", f"B = {options.b}", *compare_rooms(source_a, source_b, options.diff)]
        if a and b:
            lines += [*compare_configs(a[0], b[0]), *compare_losses(a, b), *compare_costs(a, b)]
    except (LogError, check.NeedsScipy) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
