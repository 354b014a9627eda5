"""The rooms of the training script as contracts: order, size, who may use whom, and that importing does nothing.

Every check reads the source ($TRAIN_GPT or train_gpt.py) and returns a list of violations, one line each: room, line,
what was found, what is allowed. The second half of this file proves on a small synthetic script that each can fail.
"""
import ast
import builtins
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from typing import NamedTuple

import pytest
from rank_helpers import ROOT, train_gpt_path


class Room(NamedTuple):
    title: str
    cap: int            # lines of code: non-blank, neither comment nor docstring
    may_use: tuple      # numbers of the rooms whose names it may load, besides its own and the Door's


ROOMS = (
    Room("Door", 52, ()),
    Room("Configuration", 178, ()),
    Room("World", 67, ()),
    Room("Kernels", 275, ()),
    Room("Optimizer", 249, (2, 3)),
    Room("Model", 228, (1, 3, 4)),
    Room("Data", 201, ()),
    Room("Schedules", 51, (1,)),
    Room("Log and checkpoint", 244, (1, 2)),
    Room("Training", 464, (1, 2, 3, 4, 5, 6, 7, 8)),
    Room("Front door", 50, (1, 2, 8, 9)),
)
DOOR, CONFIGURATION, WORLD, KERNELS, OPTIMIZER, MODEL, DATA, SCHEDULES, LOG, TRAINING, FRONT_DOOR = range(len(ROOMS))

RULE = "# " + "-" * 118
FILE_CODE_CAP, FILE_LINE_CAP, COLUMN_CAP = 2059, 2930, 110     # wanted: 1900 and 2700
ATTEMPT_SPARE = 100     # lines that an attempt (another file than the root's) may have above each of these ceilings
TABLE, END_OF_TABLE = "# table (tests/test_rooms.py lets these lines be wider than others)", "# end of table"
HEAD_LINES = range(2, 10)       # comment lines under a room's title
FUNCTION_CAP, FORWARD_CAP = 80, 60

ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
COLLECTIVE_NAMES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast", "barrier",
    "broadcast_object_list", "gather_object", "scatter_object_list", "init_process_group", "destroy_process_group",
}
FILE_MODULES = {"pathlib", "glob", "io", "shutil", "tempfile", "fileinput"}
LAYER_INDEX = re.compile(r"(i|j|n|l|layer\w*|\w+_layer|\w*idx|\w*index)$")


class Use(NamedTuple):
    """A name that code loads, or a dotted chain that begins with one."""
    line: int
    chain: str          # as written: "dist.all_reduce"
    origin: str | None  # the same through the imports: "torch.distributed.all_reduce"; None when not imported
    top_level: bool     # True when the first name is the module's, not a local variable


class Script:
    """A training script taken apart: rooms, lines of code, definitions and uses."""

    def __init__(self, source, spare=0):
        self.source, self.spare = source, spare
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.code_lines = find_code_lines(source, self.tree)
        self.banners = [(number, match.group(1), match.group(2)) for number, line in enumerate(self.lines, 1)
                        if (match := re.fullmatch(r"#\s*(\d+)\.\s+(.*)", line)) and number > 1
                        and re.fullmatch(r"# ?[-=*#~]{20,}", self.lines[number - 2])]
        self.starts = [number - 1 for number, _, _ in self.banners]  # lines of the rules
        self.definitions = {}   # top-level name -> list of (line, kind)
        for node in self.tree.body:
            for name, line, kind in bound_at_top(node):
                self.definitions.setdefault(name, []).append((line, kind))
        self.uses = find_uses(self.tree)

    def room(self, line):
        """Number of the room that holds this line; text before the first banner belongs to the Door."""
        return max(0, sum(start <= line for start in self.starts) - 1)

    def where(self, line):
        number = self.room(line)
        title = ROOMS[number].title if number < len(ROOMS) else "?"
        return f"room {number} ({title}), line {line}"

    def functions(self):
        """(qualified name, node) of every function, nested ones included."""
        def walk(node, prefix):
            for child in ast.iter_child_nodes(node):
                name = prefix
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    name = f"{prefix}.{child.name}" if prefix else child.name
                    if not isinstance(child, ast.ClassDef):
                        yield name, child
                yield from walk(child, name)
        yield from walk(self.tree, "")


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# ---- taking a script apart -------------------------------------------------------------------------------------------


def find_code_lines(source, tree):
    """Numbers of the lines that hold code: not blank, not only comment, not docstring."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                text = node.body[0].value
                docstrings.add((text.lineno, text.col_offset))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = source.splitlines()
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent and token.start not in docstrings:
            code.update(line for line in range(token.start[0], token.end[0] + 1) if lines[line - 1].strip())
    return code


def bound_at_top(node):
    """(name, line, kind) of what a top-level statement binds, through if, try, with and loops; kind: import, other."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, node.lineno, "other"
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name.split(".")[0]), node.lineno, "import"
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno, "other"
    elif not isinstance(node, (ast.Lambda, *COMPREHENSIONS)):  # whose variables are their own
        for child in ast.iter_child_nodes(node):
            yield from bound_at_top(child)


def bindings(scope):
    """{name: origin} of what a scope binds itself; origin is the dotted path of an import, None for anything else."""
    found, outside = {}, set()
    if isinstance(scope, FUNCTIONS):
        found.update({node.arg: None for node in ast.iter_child_nodes(scope.args) if isinstance(node, ast.arg)})

    def walk(node):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = None
            return
        if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            found.update({inner.target.id: None for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)})
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            outside.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.setdefault(node.id, None)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found[node.name] = None
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found[node.name] = None
        for child in ast.iter_child_nodes(node):
            walk(child)

    if isinstance(scope, COMPREHENSIONS):
        for generator in scope.generators:
            walk(generator.target)
    else:
        for statement in scope.body if isinstance(scope.body, list) else [scope.body]:
            walk(statement)
    return {name: origin for name, origin in found.items() if name not in outside}


def find_uses(tree):
    """Every name or dotted chain that is loaded, with its origin; locals are told apart from the module's names."""
    uses = []

    def note(name_node, chain, scopes):
        for depth, (_, names) in reversed(list(enumerate(scopes))):
            if name_node.id in names:
                origin = names[name_node.id]
                rest = chain[len(name_node.id):]
                uses.append(Use(name_node.lineno, chain, origin + rest if origin else None, depth == 0))
                return
        uses.append(Use(name_node.lineno, chain, None, True))  # a builtin, or a name that is nowhere

    def visit(node, scopes):
        if isinstance(node, ast.Attribute):
            parts, base = [], node
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name):
                note(base, ".".join([base.id, *reversed(parts)]), scopes)
            else:
                uses.append(Use(node.lineno, "(...)." + ".".join(reversed(parts)), None, False))
                visit(base, scopes)
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                note(node, node.id, scopes)
            return
        if isinstance(node, FUNCTIONS + COMPREHENSIONS + (ast.ClassDef,)):
            # A class body's names are not seen by the functions inside it.
            outer = [scope for scope in scopes if not scope[0]]
            if isinstance(node, ast.ClassDef):
                inside = [*outer, (True, bindings(node))]
                outside = [*node.decorator_list, *node.bases, *node.keywords]
                body = node.body
            elif isinstance(node, ast.Lambda):
                inside = [*outer, (False, bindings(node))]
                outside = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
                body = [node.body]
            elif isinstance(node, FUNCTIONS):
                inside = [*outer, (False, bindings(node))]
                outside = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
                body = node.body
            else:
                inside = [*outer, (False, bindings(node))]
                outside = [node.generators[0].iter]
                body = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.comprehension)]
                for number, generator in enumerate(node.generators):
                    body += [*generator.ifs, *([generator.iter] if number else [])]
            for child in outside:
                visit(child, scopes)
            for child in body:
                visit(child, inside)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, scopes)

    module = [(False, bindings(tree))]
    for statement in tree.body:
        visit(statement, module)
    return uses


def is_of(origin, *modules):
    return origin is not None and any(origin == module or origin.startswith(module + ".") for module in modules)


# ---- the contracts ---------------------------------------------------------------------------------------------------


def check_banners(script):
    faults = []
    titles = [title for _, _, title in script.banners]
    wanted = [room.title for room in ROOMS]
    for position, (line, number, title) in enumerate(script.banners):
        if position >= len(wanted) or (number, title) != (str(position), wanted[position]):
            allowed = f"'# {position}. {wanted[position]}'" if position < len(wanted) else "no further room"
            faults.append(f"line {line}: banner '# {number}. {title}', allowed here: {allowed}")
        if script.lines[line - 2] != RULE:
            faults.append(f"line {line - 1}: rule of {len(script.lines[line - 2])} characters above "
                          f"'# {number}. {title}', allowed: '# ' and 118 dashes")
        contract = 0
        for text in script.lines[line:]:
            if not text.startswith("#") or text == RULE:
                break
            contract += bool(text.strip("# "))
        if contract not in HEAD_LINES:
            faults.append(f"{script.where(line)}: contract of {contract} comment lines, allowed: {HEAD_LINES[0]} to "
                          f"{HEAD_LINES[-1]}")
    if len(titles) < len(wanted):
        missing = [title for title in wanted if title not in titles]
        faults.append(f"whole file: {len(titles)} banners, allowed: {len(wanted)}; missing: {', '.join(missing)}")
    first = script.tree.body[0] if script.tree.body else None
    if ast.get_docstring(script.tree, clean=False) is None:
        faults.append("line 1: no module docstring; the Door opens with one")
    elif script.starts and any(line.strip() for line in script.lines[first.end_lineno:script.starts[0] - 1]):
        faults.append(f"line {first.end_lineno + 1}: something between the module docstring and room 0's banner")
    return faults


def check_room_sizes(script):
    counts = [0] * len(ROOMS)
    for line in script.code_lines:
        counts[min(script.room(line), len(ROOMS) - 1)] += 1
    return [f"room {number} ({room.title}): {count} lines of code, allowed: {room.cap + script.spare}"
            for number, (room, count) in enumerate(zip(ROOMS, counts, strict=True)) if count > room.cap + script.spare]


def check_file_size(script):
    faults = []
    for count, what, cap in ((len(script.code_lines), "lines of code", FILE_CODE_CAP + script.spare),
                             (len(script.lines), "lines", FILE_LINE_CAP + script.spare)):
        if count > cap:
            faults.append(f"whole file: {count} {what}, allowed: {cap}")
    return faults


def check_text(script):
    faults, in_table = [], False
    for number, line in enumerate(script.lines, 1):
        if line.strip() in (TABLE, END_OF_TABLE):
            opens = line.strip() == TABLE
            if opens == in_table:
                faults.append(f"{script.where(number)}: '{line.strip()}' without its counterpart")
            in_table = opens
        if line == RULE and in_table:
            faults.append(f"{script.where(number)}: a room begins inside a table, allowed: '{END_OF_TABLE}' before")
            in_table = False
        if len(line) > COLUMN_CAP and line != RULE and not in_table:
            faults.append(f"{script.where(number)}: {len(line)} columns, allowed: {COLUMN_CAP}")
        if not line.isascii():
            odd = next(character for character in line if not character.isascii())
            faults.append(f"{script.where(number)}: {odd!a}, allowed: ASCII")
    return faults


def check_functions(script):
    faults = []
    for name, node in script.functions():
        size = sum(line in script.code_lines for line in range(node.lineno, node.end_lineno + 1))
        forward = node.name == "forward" and script.room(node.lineno) == MODEL
        cap = FORWARD_CAP if forward else FUNCTION_CAP
        if size > cap:
            faults.append(f"{script.where(node.lineno)}: {name} has {size} lines of code, allowed: {cap}")
    return faults


def check_imports(script):
    return [f"{script.where(line)}: import of {name} at the top level, allowed: in the Door, or inside a function"
            for name, places in script.definitions.items() for line, kind in places
            if kind == "import" and script.room(line) != DOOR]


def check_names_flow(script):
    """A room loads only names of its own, of the Door and of the rooms that it may use; no name has two rooms."""
    faults = []
    for name, places in script.definitions.items():
        rooms = sorted({script.room(line) for line, _ in places})
        if len(rooms) > 1:
            line = places[-1][0]
            faults.append(f"{script.where(line)}: {name} is defined in rooms {rooms}, allowed: one room")
    for use in script.uses:
        name = use.chain.split(".")[0]
        if not use.top_level or name not in script.definitions:
            continue
        here, there = script.room(use.line), script.room(script.definitions[name][0][0])
        if there not in (here, DOOR, *ROOMS[min(here, len(ROOMS) - 1)].may_use):
            allowed = ", ".join(map(str, ROOMS[here].may_use)) or "none but its own and the Door"
            faults.append(f"{script.where(use.line)}: uses {name} of room {there} ({ROOMS[there].title}), "
                          f"allowed rooms: {allowed}")
    return faults


def find_forbidden(script, rooms, what, allowed, test):
    """Violations in `rooms` for every use that `test` finds."""
    return [f"{script.where(use.line)}: {what} {use.chain}, allowed: {allowed}"
            for use in script.uses if script.room(use.line) in rooms and test(use)]


def others(*allowed):
    return set(range(len(ROOMS))) - set(allowed)


def check_environment(script):
    def reads(use):
        return (is_of(use.origin, *(f"os.{name}" for name in ENVIRONMENT_NAMES))
                or bool(ENVIRONMENT_NAMES & set(use.chain.split(".")[1:])))
    return find_forbidden(script, others(WORLD), "environment", "only in World", reads)


def check_collectives(script):
    def talks(use):
        called = not is_of(use.origin, "torch") and use.chain.split(".")[-1] in COLLECTIVE_NAMES and "." in use.chain
        return is_of(use.origin, "torch.distributed") or called
    return find_forbidden(script, others(WORLD, OPTIMIZER, TRAINING), "collective",
                          "only in World, Optimizer and Training", talks)


def check_clocks(script):
    def reads(use):
        return is_of(use.origin, "time") or use.chain.split(".")[-1] in ("now", "utcnow", "today")
    return find_forbidden(script, others(LOG, TRAINING), "clock", "only in Log and checkpoint, and Training", reads)


def check_torch_free(script):
    return find_forbidden(script, {CONFIGURATION, SCHEDULES}, "torch", "no torch in Configuration and Schedules",
                          lambda use: is_of(use.origin, "torch", "triton") or use.chain.split(".")[0] == "torch")


def check_files(script):
    def opens(use):
        return (is_of(use.origin, *FILE_MODULES, "os.path", "os.open", "os.listdir", "os.scandir")
                or (use.top_level and use.chain == "open")
                or use.chain.split(".")[-1] in ("read_text", "write_text", "read_bytes", "write_bytes"))
    return find_forbidden(script, {CONFIGURATION, MODEL}, "file access", "no files in Configuration and Model", opens)


def check_arguments(script):
    return find_forbidden(script, others(FRONT_DOOR), "command line", "sys.argv only in the Front door",
                          lambda use: is_of(use.origin, "sys.argv", "sys.orig_argv"))


def check_layer_literals(script):
    """A function of the model that asks `i == 3` is a table that was not written."""
    faults = []
    for name, node in script.functions():
        if script.room(node.lineno) != MODEL:
            continue
        for compare in (inner for inner in ast.walk(node) if isinstance(inner, ast.Compare)):
            sides = [compare.left, *compare.comparators]
            sides += [item for side in sides if isinstance(side, (ast.Tuple, ast.List, ast.Set)) for item in side.elts]
            literal = [side.value for side in sides if isinstance(side, ast.Constant) and type(side.value) is int]
            index = [side.id for side in sides if isinstance(side, ast.Name) and LAYER_INDEX.match(side.id)]
            if literal and index:
                faults.append(f"{script.where(compare.lineno)}: {name} tests {index[0]} against the literal "
                              f"{literal[0]}, allowed: a row of the per-layer table")
    return faults


CHECKS = (check_banners, check_room_sizes, check_file_size, check_text, check_functions, check_imports,
          check_names_flow, check_environment, check_collectives, check_clocks, check_torch_free, check_files,
          check_arguments, check_layer_literals)

# Runs in a process of its own, in an empty folder; prints what importing the script changed as a JSON list.
IMPORT_PROBE = textwrap.dedent("""
    import contextlib, importlib.util, io, json, os, signal, sys, threading, warnings
    sys.dont_write_bytecode = True
    import torch
    import torch.distributed
    import torch.nn.attention.flex_attention  # what these packages do to the process is not the script's doing

    def state():
        children = ""
        with contextlib.suppress(OSError):
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = file.read()
        return {
            "environment": dict(os.environ),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "child processes": children,
            "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
            "CUDA context": torch.cuda.is_initialized(),
            "working folder": os.getcwd(),
            "files in the working folder": sorted(os.listdir()),
            "random state": torch.get_rng_state().sum().item(),
            "default dtype": str(torch.get_default_dtype()),
            "default device": str(torch.get_default_device()),
            "signal handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
            "arguments": list(sys.argv),
        }

    before = state()
    spoken = io.StringIO()
    with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(spoken):
        spec = importlib.util.spec_from_file_location("train_gpt", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        sys.modules["train_gpt"] = module
        spec.loader.exec_module(module)
    after = state()
    faults = []
    for key in before:
        if before[key] != after[key]:
            was, now = before[key], after[key]
            if isinstance(was, dict):
                names = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
                was, now = {name: was.get(name) for name in names}, {name: now.get(name) for name in names}
            faults.append(f"importing changed: {key}, from {was} to {now}; allowed: nothing")
    if spoken.getvalue():
        faults.append(f"importing printed {spoken.getvalue()[:200]!r}; allowed: nothing")
    print(json.dumps(faults))
    sys.stdout.flush()
    os._exit(0)
""")


def check_import(path, folder):
    """What importing the script at `path` changes in a fresh process whose working folder is the empty `folder`."""
    result = subprocess.run([sys.executable, "-c", IMPORT_PROBE, str(path)], cwd=folder, text=True, capture_output=True,
                            timeout=120)
    if result.returncode:
        return [f"importing failed: {(result.stderr.strip().splitlines() or ['exit %d' % result.returncode])[-1]}"]
    return json.loads(result.stdout.splitlines()[-1])


# ---- the script ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spare = 0 if train_gpt_path() == ROOT / "train_gpt.py" else ATTEMPT_SPARE
    return Script(train_gpt_path().read_text(encoding="utf-8"), spare)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[len("check_"):])
def test_contract(script, check):
    faults = check(script)
    assert not faults, f"{len(faults)} in {train_gpt_path().name}:\n" + "\n".join(faults)


def test_importing_does_nothing(tmp_path):
    faults = check_import(train_gpt_path(), tmp_path)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_the_source_in_the_log_is_the_text_that_runs_byte_for_byte(tmp_path, monkeypatch, line_end):
    """The file is edited at the first import that takes time, and before torch's. Without triton, whose decorator reads
    the kernel's lines from the file once more."""
    path = tmp_path / "edited.py"
    text = train_gpt_path().read_text(encoding="utf-8").replace("\n", line_end).encode()
    path.write_bytes(text)
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", module)
    real, imported = builtins.__import__, []

    def import_and_edit(name, globals=None, *rest):
        if globals is vars(module):
            imported.append(name)
            if name.partition(".")[0] == "triton":
                raise ImportError
            if name != "pathlib":
                path.write_text("print('edited')\n")
        return real(name, globals, *rest)
    monkeypatch.setattr(builtins, "__import__", import_and_edit)
    spec.loader.exec_module(module)
    assert "torch" in imported and path.read_text() == "print('edited')\n"
    assert module.SOURCE.encode() == text


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_checkout_for_windows_keeps_the_line_ends(tmp_path):
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    kept = {"run.sh": b"echo 1\n", "train_gpt.py": b"x = 1\n", "records/a/log.txt": b"x = 1\r\ny = 1\n"}
    for name, content in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    commands = "init -q", "add -A", "commit -qm all", "rm -rq run.sh train_gpt.py records", "checkout HEAD ."
    for command in commands:
        subprocess.run([*git, *command.split()], check=True, capture_output=True, timeout=60)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


# ---- the checks themselves -------------------------------------------------------------------------------------------

GOOD_SCRIPT = """
# 0. Door
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    import triton
except ImportError:
    triton = None

SOURCE = Path(__file__).read_text()
# 1. Configuration
class Config:
    'Numbers.'
    layers = 2

LIMIT: int = 3
# 2. World
class World:
    rank = 0

def init_world():
    dist.init_process_group()
    return os.environ.get('RANK')
# 3. Kernels
def kernel(x):
    return F.relu(x)

if triton is not None:
    def fast_kernel(x):
        return kernel(x)
# 4. Optimizer
def step(world: World, x):
    dist.all_reduce(x)
    return kernel(x)
# 5. Model
class GPT(nn.Module):
    def forward(self, x):
        for i in range(LIMIT):
            x = kernel(x)
            x = x if i in self.skips else -x
        return x
# 6. Data
def read(files):
    return [open(file) for file in files]
# 7. Schedules
def rate(step, config: Config):
    return [step for step in range(step)]
# 8. Log and checkpoint
def save(config: Config, world: World):
    torch.save({}, "file")
    return time.time()
# 9. Training
def train(config):
    model, log = GPT(), save(config, World())
    step(World(), model(rate(1, config)))
    return read([]), time.perf_counter(), dist.barrier(), log
# 10. Front door
def main(argv):
    return train(Config)

if __name__ == '__main__':
    main(sys.argv[1:])
"""


def synthetic(**changes):
    """A small script with all rooms that keeps every contract; `changes`: text to append, e.g. room5="x = 1"."""
    text = '"""A claim."""\n'
    bodies = re.split(r"\n# \d+\. .*\n", GOOD_SCRIPT)[1:]
    for number, (room, body) in enumerate(zip(ROOMS, bodies, strict=True)):
        body += "\n" + changes.get(f"room{number}", "")
        text += f"{RULE}\n# {number}. {room.title}\n# A contract.\n# Its words.\n\n{body}\n\n"
    return text


def test_a_good_script_has_no_violation(tmp_path):
    good = Script(synthetic())
    assert [fault for check in CHECKS for fault in check(good)] == []
    (tmp_path / "good.py").write_text(good.source)
    folder = tmp_path / "empty"
    folder.mkdir()
    assert check_import(tmp_path / "good.py", folder) == []


LONG = "def f():\n" + "    x = 1\n" * 80
FORWARD = "class Net:\n    def forward(self, x):\n" + "        x = 1\n" * 60
BAD_TEXT = [  # check, where it is said to be, what is said, how the good text is spoiled
    (check_banners, "", "'# 4. Model', allowed here: '# 4. Optimizer'",
     lambda text: text.replace("# 4. Optimizer", "# 4. Model")),
    (check_banners, "", "'# 6. Data', allowed here: '# 5. Model'", lambda text: text.replace("# 5. Model", "# Model")),
    (check_banners, "", "missing: Front door", lambda text: text[:text.index(f"{RULE}\n# 10.")]),
    (check_banners, "", "no further room", lambda text: text + f"{RULE}\n# 11. Attic\n# A contract.\n# Its words.\n"),
    (check_banners, "line 2:", "rule of 121 characters", lambda text: text.replace(RULE, RULE + "-", 1)),
    (check_banners, "room 0 (Door)", "contract of 1", lambda text: text.replace("# A contract.\n", "", 1)),
    (check_banners, "room 0 (Door)", "contract of 10",
     lambda text: text.replace("# A contract.\n", "# A contract.\n" * 9, 1)),
    (check_banners, "line 1", "no module docstring", lambda text: text.replace('"""A claim."""\n', "")),
    (check_banners, "line 2", "between the module docstring",
     lambda text: text.replace('m."""\n', 'm."""\nimport os\n')),
    (check_file_size, "whole file", f"{FILE_CODE_CAP + 1}", lambda text: "x = 1\n" * (FILE_CODE_CAP + 1)),
    (check_file_size, "whole file", f"{FILE_LINE_CAP + 1} lines", lambda text: "# x\n" * (FILE_LINE_CAP + 1)),
    (check_text, "room 10 (Front door)", "111 columns", lambda text: text + "#" * 111 + "\n"),
    (check_text, "room 10 (Front door)", "112 columns",
     lambda text: text + f"    {TABLE}\n{'#' * 120}\n    # end of table\n{'#' * 112}\n"),
    (check_text, "room 10 (Front door)", f"'{TABLE}' without", lambda text: text + f"{TABLE}\n{TABLE}\n"),
    (check_text, "room 10 (Front door)", "'# end of table' without", lambda text: text + "# end of table\n"),
    (check_text, "room 1 (Configuration)", "a room begins inside a table",
     lambda text: text.replace("# 0. Door\n", f"# 0. Door\n{TABLE}\n")),
    (check_text, "room 10 (Front door)", r"'\xb5', allowed: ASCII", lambda text: text + "# \u00b5\n"),
]


@pytest.mark.parametrize("check, where, what, spoil", BAD_TEXT)
def test_a_spoiled_text_is_found(check, where, what, spoil):
    faults = check(Script(spoil(synthetic())))
    assert any(fault.startswith(where) and what in fault for fault in faults), faults


BAD_ROOMS = [  # check, room, code appended to it, what is said
    *((check_room_sizes, number, "x = 1\n" * room.cap, f"allowed: {room.cap}") for number, room in enumerate(ROOMS)),
    (check_functions, KERNELS, LONG, "f has 81 lines of code, allowed: 80"),
    (check_functions, LOG, "class A:\n" + textwrap.indent(LONG, "    "), "A.f has 81"),
    (check_functions, DATA, "def f():\n    x = '''\n" + "text\n" * 90 + "    '''\n", "f has 93 lines"),
    (check_functions, MODEL, FORWARD, "Net.forward has 61 lines of code, allowed: 60"),
    (check_imports, DATA, "import numpy\n", "import of numpy"),
    (check_imports, KERNELS, "try:\n    import triton.language as tl\nexcept OSError:\n    pass\n", "import of tl"),
    (check_names_flow, CONFIGURATION, "y = World\n", "uses World of room 2"),
    (check_names_flow, WORLD, "def f(config: Config):\n    pass\n", "uses Config of room 1"),
    (check_names_flow, KERNELS, "def f():\n    return [LIMIT for _ in (1,)]\n", "uses LIMIT of room 1"),
    (check_names_flow, OPTIMIZER, "def f(x=Config):\n    pass\n", "uses Config of room 1"),
    (check_names_flow, OPTIMIZER, "f = lambda: GPT\n", "uses GPT of room 5"),
    (check_names_flow, MODEL, "class B:\n    read = 1\n    def f(self):\n        return read\n", "uses read of room 6"),
    (check_names_flow, DATA, "@rate\ndef f():\n    pass\n", "uses rate of room 7"),
    (check_names_flow, SCHEDULES, "def f():\n    global kernel\n    return kernel\n", "uses kernel of room 3"),
    (check_names_flow, LOG, "def f():\n    if (save2 := read):\n        return save2\n", "uses read of room 6"),
    (check_names_flow, TRAINING, "def f():\n    return main(GPT)\n", "uses main of room 10"),
    (check_names_flow, FRONT_DOOR, "def f():\n    return GPT.forward\n", "uses GPT of room 5"),
    (check_names_flow, DATA, "def kernel():\n    pass\n", "kernel is defined in rooms [3, 6]"),
    (check_names_flow, DATA, "with open('a') as (_, LIMIT):\n    pass\n", "LIMIT is defined in rooms [1, 6]"),
    (check_names_flow, DATA, "for LIMIT in (1,):\n    pass\n", "LIMIT is defined in rooms [1, 6]"),
    (check_environment, DATA, "x = os.environ['A']\n", "os.environ"),
    (check_environment, LOG, "def f():\n    from os import getenv as g\n    return g('A')\n", "environment g"),
    (check_environment, KERNELS, "def f():\n    os.environ['A'] = '1'\n", "os.environ"),
    (check_environment, TRAINING, "def f():\n    __import__('os').environ['A'] = '1'\n", "environ"),
    (check_collectives, MODEL, "def f(x):\n    dist.all_reduce(x)\n", "dist.all_reduce"),
    (check_collectives, DATA, "def f():\n    return torch.distributed.get_rank()\n", "torch.distributed.get_rank"),
    (check_collectives, KERNELS, "def f(group, x):\n    group.all_gather(x)\n", "group.all_gather"),
    (check_collectives, LOG, "def f():\n    dist.barrier()\n", "dist.barrier"),
    (check_collectives, LOG, "def f():\n    import torch.distributed.checkpoint as c\n    c.load({})\n", "c.load"),
    (check_clocks, MODEL, "def f():\n    return time.time()\n", "time.time"),
    (check_clocks, DOOR, "START = time.monotonic()\n", "time.monotonic"),
    (check_clocks, MODEL, "def f():\n    import datetime\n    return datetime.datetime.now()\n", "datetime.now"),
    (check_clocks, DATA, "def f():\n    from time import sleep\n    sleep(1)\n", "sleep"),
    (check_torch_free, CONFIGURATION, "dtype = torch.float32\n", "torch.float32"),
    (check_torch_free, SCHEDULES, "def f(x: nn.Module):\n    pass\n", "nn.Module"),
    (check_torch_free, SCHEDULES, "def f(x):\n    return F.relu(x)\n", "F.relu"),
    (check_files, CONFIGURATION, "def f():\n    return open('a')\n", "open"),
    (check_files, MODEL, "def f(x):\n    return Path(x).exists()\n", "Path"),
    (check_files, MODEL, "def f(x):\n    return x.read_text()\n", "x.read_text"),
    (check_arguments, TRAINING, "x = sys.argv\n", "sys.argv"),
    (check_layer_literals, MODEL, "class B:\n    def forward(self, x):\n        for i in x:\n            x += i == 3\n",
     "literal 3"),
    (check_layer_literals, MODEL,
     "class B:\n    def hidden(self, x, layer_idx):\n        return layer_idx in (0, 7)\n", "literal 0"),
]


@pytest.mark.parametrize("check, room, code, what", BAD_ROOMS)
def test_a_spoiled_room_is_found(check, room, code, what):
    faults = check(Script(synthetic(**{f"room{room}": code})))
    assert len(faults) == 1 and what in faults[0] and f"room {room} ({ROOMS[room].title})" in faults[0], faults


INNOCENT = [  # room, code that a rough check would take for a violation
    (DATA, "def f(kernel, time):\n    return kernel(time.time)\n"),                     # parameters
    (DATA, "def f():\n    rate = 1\n    return lambda: rate\n"),                         # a local, seen from a closure
    (DATA, "ids = [kernel for kernel in (1, 2)]\n"),
    (MODEL, "def f(xs):\n    return [step + 1 for step in xs]\n"),                       # a comprehension's variable
    (KERNELS, "def f():\n    try:\n        pass\n    except OSError as save:\n        return save\n"),
    (KERNELS, "def f(self):\n    return self.rate.time\n"),                              # attributes of an object
    (SCHEDULES, "def f(torch_like):\n    'Says torch.Tensor and os.environ.'\n    return torch_like\n"),
    (MODEL, "class B:\n    def forward(self, x, dim):\n        return x if dim == 3 else x + 1\n"),
    (KERNELS, "def f():\n" + "    # comment\n" * 90 + "    return 1\n"),
    (KERNELS, "def f():\n    '''" + "doc\n" * 90 + "    '''\n"),
    (SCHEDULES, f"{TABLE}\nrows = (\n    {'1, ' * 36}\n)\n# end of table\n"),
    (OPTIMIZER, "def f(x):\n    return dist.reduce_scatter_tensor(x), torch.distributed.get_rank()\n"),
    (WORLD, "def f():\n    import datetime\n    return datetime.timedelta(minutes=1)\n"),
]


@pytest.mark.parametrize("room, code", INNOCENT)
def test_innocent_code_is_left_alone(room, code):
    script = Script(synthetic(**{f"room{room}": code}))
    faults = [fault for check in CHECKS for fault in check(script)]
    assert faults == []


def test_an_attempt_has_lines_to_spare_and_the_script_of_the_root_has_none(script):
    code = "x = 1\n" * (ROOMS[DATA].cap + 50)
    assert check_room_sizes(Script(synthetic(room6=code))) and not check_room_sizes(Script(synthetic(room6=code), 100))
    assert not check_file_size(Script("x = 1\n" * (FILE_CODE_CAP + 100), 100))
    assert check_file_size(Script("x = 1\n" * (FILE_CODE_CAP + 101), 100))
    assert script.spare == (0 if train_gpt_path() == ROOT / "train_gpt.py" else 100)


def test_lines_of_code_are_counted_as_readers_count():
    source = ('"""Doc.\n\nMore.\n"""\n# comment\n\nx = 1  # code\ny = """a\n\nb"""\n\n\n'
              'def f():\n    "Doc."\n    return (\n        1\n    )\n')
    assert sorted(find_code_lines(source, ast.parse(source))) == [7, 8, 10, 13, 15, 16, 17]


SIDE_EFFECTS = [  # code that runs on import, what is said
    ("os.environ['LEFT_BEHIND'] = '1'", "environment, from {'LEFT_BEHIND': None} to {'LEFT_BEHIND': '1'}"),
    ("import threading\nthreading.Thread(target=time.sleep, args=(30,), name='idler', daemon=True).start()", "threads"),
    ("open('left_behind', 'w').close()", "files in the working folder"),
    ("torch.manual_seed(7)\ntorch.rand(3)", "random state"),
    ("torch.set_default_dtype(torch.float64)", "default dtype"),
    ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal handlers"),
    ("print('hello')", "printed 'hello"),
    ("import subprocess\nsubprocess.Popen(['/bin/sleep', '2'])", "child processes"),
    ("dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())", "process group"),
]


def test_side_effects_of_an_import_are_found(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(synthetic(room10="\n".join(code for code, _ in SIDE_EFFECTS) + "\n"))
    folder = tmp_path / "empty"
    folder.mkdir()
    faults = check_import(path, folder)
    for _, what in SIDE_EFFECTS:
        assert sum(what in fault for fault in faults) == 1, (what, faults)
    path.write_text("raise ValueError('broken')\n")
    assert check_import(path, folder) == ["importing failed: ValueError: broken"]
