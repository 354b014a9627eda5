"""README.md held to its own rules: one minute to read, commands that name what exists, figures that logs carry."""
import re
import shlex
import statistics
import sys

import pytest
from rank_helpers import ROOT, load_train_gpt

sys.path.insert(0, str(ROOT))
from records.logs import parse_log  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


def sentences(text):
    """Of the prose: code, tables, pictures and headings left out; a link counts as its text."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|^- ", text, flags=re.MULTILINE):
        lines = [line for line in paragraph.splitlines() if not line.startswith(("|", "#"))]
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(lines).strip())


def test_it_is_short_and_its_sentences_are_too():
    assert len(README.splitlines()) <= 135
    long = [sentence for sentence in sentences(README) if len(sentence.split()) > 30]
    assert not long, long


def test_each_link_leads_to_something_that_is_there():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert len(targets) > 5 and not missing, missing


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_files_and_options_that_exist(command):
    words = shlex.split(command)
    scripts = [word for word in words if word.endswith((".py", ".sh")) and "attempts/" not in word]
    assert all((ROOT / script).exists() for script in scripts), scripts
    if "train_gpt.py" in words and "compare.py" not in command and words[0] != "mkdir":
        options = [word for word in words[words.index("train_gpt.py") + 1:] if word != "--help"]
        load_train_gpt().parse_config(options)


def test_the_claimed_figures_are_those_of_the_logs():
    """Each row of the table of claims: seconds, loss and number of runs, from the folder that it links to."""
    rows = re.findall(r"^\|[^|]+\| ([\d.]+) s \(loss ([\d.]+)\) \|.*\| (\d+);[^|]*\| \[logs\]\(([^)]+)\) \|$",
                      README, re.MULTILINE)
    assert rows
    for seconds, loss, count, folder in rows:
        results = [parse_log(path).result for path in sorted((ROOT / folder).glob("*.txt"))]
        assert len(results) == int(count)
        assert f"{statistics.mean(r['train_time_ms'] for r in results) / 1000:.1f}" == seconds
        assert f"{statistics.mean(r['val_loss'] for r in results):.4f}" == loss
