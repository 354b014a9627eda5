"""Reads the log of one run: the one parser that every tool in this folder shares.

A log is three parts between two fences (a line of exactly 100 '='; a source may hold such lines too):

    <source of the script that ran, verbatim>
    FENCE
    {header: one line of JSON}
    <what nvidia-smi printed, zero or more lines>
    FENCE
    <events: step lines, notes, all step times, the result>

`parse_log(path)` returns a `Log` or raises `LogError` with one readable line. A log without its result line
(a run that was killed, or still runs) parses, with `result` None: pictures and comparisons may use it, the
checker refuses it. Needs the standard library only.
"""

import bisect
import hashlib
import json
import math
import re
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FENCE = "=" * 100
FORMAT = 1
HEADER_KEYS = ("format", "run_id", "config", "overrides", "argv", "source_sha256", "seed", "devices",
               "world_size", "data", "versions", "git")
# Overrides that change where a run reads, writes or splits its work, and never what it computes.
HARMLESS_OVERRIDES = frozenset(
    ("seed", "log_dir", "micro_rows", "train_files", "val_files",
     "checkpoint_every_steps", "checkpoint_dir", "self_check"))

_STEP_LINE = re.compile(r"step:(\d+)/(\d+) (val_loss|train_loss):(\S+)((?: [a-z_]+:\S+)*)\s*")
_RULE_LINE = re.compile(r"# ?[-=]{3,}\s*")
_ROOM_LINE = re.compile(r"# (\d+)\. (.+)")


class LogError(Exception):
    """One readable line about a file that is not one whole log."""


@dataclass(frozen=True)
class Point:
    """One step line. Loss in nats per token; `fields` holds what else the line says (train_time and step_avg
    in ms)."""
    step: int
    num_steps: int
    loss: float
    fields: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.fields.get("train_time", math.nan) / 1000


@dataclass(frozen=True)
class SlowStep:
    """A step that took far longer than its neighbours (`usual_ms`: the median around it)."""
    step: int
    ms: float
    usual_ms: float
    why: str


@dataclass(frozen=True)
class Log:
    """What one log file says. Paths of the numbers: see the format in this module's docstring."""
    path: Path
    size_bytes: int
    source: bytes
    source_sha256: str            # recomputed from `source`; header["source_sha256"] is what the header says
    header: dict
    nvidia_smi: str
    validation: tuple[Point, ...]
    training: tuple[Point, ...]
    notes: tuple[str, ...]        # note:, warn: and any line that is no other event
    step_times_ms: tuple[float, ...]
    result: dict | None
    measured_sha256: str | None   # of the step and step-time lines; None when there are none

    @property
    def run_id(self) -> str:
        return str(self.header["run_id"])

    @property
    def seed(self):
        return self.header["seed"]

    @property
    def config(self) -> dict:
        return self.header["config"]

    @property
    def target_loss(self) -> float | None:
        """The loss to reach, nats per token; None for a run that just runs to its end (0 in its
        configuration)."""
        return self.config.get("target_loss") or None

    @property
    def hardware(self) -> str:
        """Number and kind of devices, such as '8 x NVIDIA H100 80GB HBM3'."""
        names = [str(name) for name in self.header["devices"]]
        kinds = sorted(set(names)) or ["unknown device"]
        return f"{self.header['world_size']} x {' + '.join(kinds)}"

    @property
    def disqualifying_overrides(self) -> dict:
        """The overrides given by hand that change what is computed."""
        given = self.header["overrides"].items()
        return {key: value for key, value in given if key not in HARMLESS_OVERRIDES}

    @property
    def recipe(self) -> tuple:
        """What was computed: the source and every configuration value that is not harmless. Equal for seeds
        of one idea."""
        config = {key: value for key, value in self.config.items() if key not in HARMLESS_OVERRIDES}
        return self.source_sha256, json.dumps(config, sort_keys=True)

    @property
    def sha_matches(self) -> bool:
        return self.source_sha256 == self.header["source_sha256"]

    @property
    def resumed(self) -> bool:
        return bool(self.header.get("resumed_from")) or bool(self.result and self.result.get("resumed"))

    @property
    def finished(self) -> bool:
        """The run did all its steps. A run that stopped early because it saw its target did not."""
        result = self.result or {"status": "none"}
        return result["status"] in ("finished", "target_reached") and result["step"] == result["num_steps"]

    @property
    def val_loss(self) -> float:
        """Final validation loss, full precision; NaN without a result."""
        loss = self.result.get("val_loss") if self.result else None
        return math.nan if loss is None else float(loss)

    @property
    def train_time_s(self) -> float:
        """Timed training seconds of the whole run; NaN without a result."""
        return float(self.result["train_time_ms"]) / 1000 if self.result else math.nan

    @property
    def val_tokens(self):
        return self.result.get("val_tokens") if self.result else self.config.get("val_tokens")

    def data_identity(self, split: str) -> tuple:
        """((fingerprint, tokens), ...) of the files of 'train' or 'val': what they hold, not where they
        lie."""
        files = self.header["data"][split]["files"]
        return tuple((entry["fingerprint"], entry["tokens"]) for entry in files)

    def tokens_at(self, step: int) -> float:
        """Tokens trained on after `step` steps: as logged (tokens:N on lines, the total in the result), on a
        straight line between and behind such steps; batch_tokens * step in a log without any. NaN when the
        log can't say."""
        known = {0: 0.0} | {point.step: point.fields["tokens"] for point in self.validation + self.training
                            if "tokens" in point.fields}
        if self.result and self.result.get("tokens_trained") and self.result["step"]:
            known[self.result["step"]] = float(self.result["tokens_trained"])
        if len(known) == 1:
            batch_tokens = self.config.get("batch_tokens")
            return math.nan if batch_tokens is None else float(batch_tokens * step)
        steps = sorted(known)
        i = min(max(1, bisect.bisect_left(steps, step)), len(steps) - 1)
        before, after = steps[i - 1], steps[i]
        return known[before] + (known[after] - known[before]) * (step - before) / (after - before)

    def seconds_to(self, loss: float) -> float | None:
        """Timed seconds until the validation loss first passes `loss`, linear between validations; None if
        never."""
        previous = None
        for point in self.validation:
            if point.loss <= loss:
                if previous is None or previous.loss == point.loss:
                    return point.seconds
                share = (previous.loss - loss) / (previous.loss - point.loss)
                return previous.seconds + share * (point.seconds - previous.seconds)
            previous = point
        return None

    @cached_property
    def slow_steps(self) -> tuple[SlowStep, ...]:
        """Steps over 1.25 times the median of the 21 steps around them (and 0.5 ms more), slowest first."""
        times, found = self.step_times_ms, []
        validated = {point.step for point in self.validation}
        for i, ms in enumerate(times):
            low = min(max(0, i - 10), max(0, len(times) - 21))
            usual = statistics.median(times[low:low + 21])
            if ms > 1.25 * usual and ms > usual + 0.5:
                why = "after validation" if i in validated else ""
                if i == 0:
                    why = "first step"
                found.append(SlowStep(i + 1, ms, usual, why))
        return tuple(sorted(found, key=lambda slow: slow.usual_ms - slow.ms))


def parse_log(path) -> Log:
    """Read the log at `path`. Raises LogError (one line, names the file) for a file that is unreadable,
    foreign, cut short before its events, or more than one log."""
    path = Path(path)
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise LogError(f"{path.name}: can't be read ({error.strerror})") from None
    if not blob:
        raise LogError(f"{path.name}: empty file")
    lines = [line + b"\n" for line in blob.split(b"\n")]
    first, second = _find_fences(path.name, lines)
    source = b"".join(lines[:first])
    if not source.strip():
        raise LogError(f"{path.name}: holds no source before its first fence")
    try:
        source.decode("utf-8")
        head = [line.decode("utf-8").rstrip("\r\n") for line in lines[first + 1:second]]
        event_lines = [line.decode("utf-8").rstrip("\r\n") for line in lines[second + 1:]]
    except UnicodeDecodeError:
        raise LogError(f"{path.name}: not UTF-8 text") from None
    header = _parse_header(path, head)
    events = _parse_events(path, event_lines, first_line=second + 2, cut=not blob.endswith(b"\n"))
    sha256 = hashlib.sha256(source).hexdigest()
    return Log(path=path, size_bytes=len(blob), source=source, source_sha256=sha256, header=header,
               nvidia_smi="\n".join(head[1:]), **events)


def _find_fences(name: str, lines: list[bytes]) -> tuple[int, int]:
    """Numbers of the lines that end the source and the header. Raises LogError when they are not there, or
    more are.

    A source may itself hold lines of 100 '='. The right one is that before which stands the source whose
    sha256 the header behind it names; in a log without such a one, the first that has a header behind it.
    """
    fences = [i for i, line in enumerate(lines) if line.rstrip(b"\r\n") == FENCE.encode()]
    if not fences:
        raise LogError(f"{name}: not a log of this project, or cut short in its source (no line of 100 '=')")
    with_header = []
    for place, line_number in enumerate(fences):
        header = _json_dict(lines[line_number + 1]) if line_number + 1 < len(lines) else None
        if header is None:
            continue
        with_header.append(place)
        if header.get("source_sha256") == hashlib.sha256(b"".join(lines[:line_number])).hexdigest():
            with_header = [place]
            break
    first = with_header[0] if with_header else 0
    after = len(fences) - first - 1
    if after == 0:
        raise LogError(f"{name}: cut short before its events (only the first of two fences is there)")
    if after > 1:
        raise LogError(f"{name}: {after + 1} fences instead of 2: more than one log in one file")
    return fences[first], fences[first + 1]


def _json_dict(line: bytes | str) -> dict | None:
    """The JSON object on a line; None where there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):                     # no JSON, or no UTF-8
        return None
    return value if isinstance(value, dict) else None


def _parse_header(path: Path, head: list[str]) -> dict:
    """The header dict from the lines between the fences, every key that the tools rely on present and of its
    kind."""
    header = _json_dict(head[0]) if head else None
    if header is None:
        raise LogError(f"{path.name}: the line after the first fence is not a JSON header")
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise LogError(f"{path.name}: header lacks {', '.join(missing)}")
    if header["format"] != FORMAT:
        raise LogError(f"{path.name}: log format {header['format']}, these tools read format {FORMAT}")
    for key, kind in (("config", dict), ("overrides", dict), ("devices", list), ("data", dict),
                      ("argv", list), ("versions", dict), ("git", dict)):
        if not isinstance(header[key], kind):
            raise LogError(f"{path.name}: header's {key} is not a {kind.__name__}")
    for name, value in (("seed", header["seed"]), ("world_size", header["world_size"])):
        if not isinstance(value, int):
            raise LogError(f"{path.name}: header's {name} is not a whole number")
    _need_numbers(path.name, header["config"], ("target_loss", "batch_tokens", "val_tokens"))
    for split in ("train", "val"):
        try:
            files = header["data"][split]["files"]
            complete = all(isinstance(entry["fingerprint"], str) and isinstance(entry["tokens"], int)
                           for entry in files)
        except (KeyError, TypeError):
            complete = False
        if not complete:
            raise LogError(f"{path.name}: header's data.{split}.files lacks fingerprints or tokens")
    return header


def _need_numbers(where: str, values: dict, optional=(), required=()) -> None:
    """Raises LogError unless the required values are numbers and the optional ones are numbers, null or
    absent."""
    for key in (*required, *optional):
        value = values.get(key)
        if not isinstance(value, (int, float)) and (value is not None or key in required):
            raise LogError(f"{where}: {key} is not a number")


def _parse_events(path: Path, lines: list[str], first_line: int, cut: bool) -> dict:
    """The fields of Log that come from the events. `cut`: the file ends inside a line, so its last line may
    be half a line and counts only when it is a whole result."""
    validation, training, notes, step_times, result, measured = [], [], [], (), None, []
    for i, line in enumerate(lines):
        is_half = cut and i == len(lines) - 1
        if not line.strip() or (is_half and not line.startswith("result:")):
            continue
        where = f"{path.name}: line {first_line + i}"
        try:
            if line.startswith("step:"):
                point, is_validation = _parse_step(line)
                (validation if is_validation else training).append(point)
                measured.append(line)
            elif line.startswith("step_times_ms:"):
                if step_times:
                    raise LogError(f"{where}: a second step_times_ms line: more than one run in one file")
                step_times = tuple(float(ms) for ms in json.loads(line.split(":", 1)[1]))
                measured.append(line)
            elif line.startswith("result:"):
                if result is not None:
                    raise LogError(f"{where}: a second result line: more than one run in one file")
                result = _parse_result(where, json.loads(line.split(":", 1)[1]))
                if result is None:
                    notes.append(line)
            else:
                notes.append(line)
        except (ValueError, TypeError):
            if not is_half:
                raise LogError(f"{where}: not an event this parser knows: {line[:60]}") from None
    for points in (validation, training):
        for before, after in zip(points, points[1:], strict=False):
            if after.step <= before.step:
                raise LogError(f"{path.name}: step {after.step} follows step {before.step}: "
                               "more than one run in it")
    measured_sha256 = hashlib.sha256("\n".join(measured).encode()).hexdigest() if measured else None
    return dict(validation=tuple(validation), training=tuple(training), notes=tuple(notes),
                step_times_ms=step_times, result=result, measured_sha256=measured_sha256)


def _parse_result(where: str, result) -> dict | None:
    """The checked result; None for that of a run that broke off, which has no result that counts. Raises
    LogError."""
    if not isinstance(result, dict) or not isinstance(result.get("status"), str):
        raise LogError(f"{where}: result line has no status")
    if result["status"] in ("failed", "refused"):
        return None
    _need_numbers(f"{where} (result)", result, required=("step", "num_steps", "train_time_ms"),
                  optional=("val_loss", "val_tokens", "tokens_trained", "step_avg_ms", "peak_memory_mib",
                            "time_to_first_step_s"))
    return result


def _parse_step(line: str) -> tuple[Point, bool]:
    """One step line -> (point, whether it is a validation). Raises ValueError."""
    match = _STEP_LINE.fullmatch(line)
    if not match:
        raise ValueError(line)
    fields = {}
    for pair in match[5].split():
        key, text = pair.split(":", 1)
        fields[key] = float(text.removesuffix("ms"))
    return Point(int(match[1]), int(match[2]), float(match[4]), fields), match[3] == "val_loss"


def logs_in(place) -> tuple[list[Log], list[str]]:
    """Logs of a file, or of a folder's own *.txt files in name order, and one line for each that is no
    log."""
    place = Path(place)
    paths = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    logs, problems = [], []
    for path in paths:
        try:
            logs.append(parse_log(path))
        except LogError as error:
            problems.append(str(error))
    return logs, problems


def read_places(places) -> list[tuple[str, list[Log]]]:
    """[(label, logs)] for files and folders; a folder's baseline/ sub-folder follows as a group of its own,
    and logs of different sources or configurations in one folder are groups of their own. Raises LogError
    when a place holds no log or a broken one."""
    groups = []
    for place in map(Path, places):
        subfolders = [place / "baseline"] if (place / "baseline").is_dir() else []
        for part in [place, *subfolders]:
            logs, problems = logs_in(part)
            if problems:
                raise LogError(problems[0])
            if not logs and part == place and not subfolders:
                raise LogError(f"{place}: no log (*.txt) there")
            name = place.resolve().name if place.is_dir() else place.stem
            label = name if part == place else f"{name}: baseline"
            recipes: dict[tuple, list[Log]] = {}
            for log in logs:
                recipes.setdefault(log.recipe, []).append(log)
            for same in recipes.values():
                groups.append((label if len(recipes) == 1 else same[0].path.stem, same))
    return groups


def rooms_of(source: str) -> dict[str, tuple[str, list[str]]]:
    """{'3': ('Kernels', lines)}: the rooms of a script, each announced by a rule line and '# N. Title'. Lines
    before the first room are room ''. A room number that comes twice gets a suffix: 3, 3+."""
    rooms, lines = {"": ("top of file", [])}, source.splitlines()
    key = ""
    for i, line in enumerate(lines):
        following = None
        if i + 1 < len(lines) and _RULE_LINE.fullmatch(line):
            following = _ROOM_LINE.fullmatch(lines[i + 1])
        if following:
            key = following[1]
            while key in rooms:
                key += "+"
            rooms[key] = (following[2].rstrip(" -="), [])
        rooms[key][1].append(line)
    return rooms
