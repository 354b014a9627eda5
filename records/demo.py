"""Trains the demo, and says at its end what the numbers mean and what the model writes. run.sh starts it.

    python records/demo.py --preset=demo [--key=value ...]      options of the trainer ($TRAIN_GPT, or train_gpt.py)

The closing words come from the checkpoint that the demo writes at its end; where there is none, or where the
tokens are no bytes, there are none. Signals and exit codes are the trainer's own.
"""

import contextlib
import math
import os
import re
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from records import checkpoints, evaluate, sample  # noqa: E402


def bigram_loss(c, train, val) -> float:
    """Nats a byte of the same targets by the add-one-smoothed bigram table of the training shards."""
    def pairs(stream, count):
        tokens = stream.read(0, count + 1)
        return tokens[:-1].long() * c.vocab_size + tokens[1:]
    counts = torch.bincount(pairs(train, train.num_tokens - 1), minlength=c.vocab_size ** 2)
    logp = (counts.view(c.vocab_size, -1) + 1).double().log()
    logp = (logp - logp.logsumexp(1, keepdim=True)).flatten()
    found = pairs(val, c.val_tokens)
    return -float(logp[found[found % c.vocab_size != c.eod_id]].mean())


def closing_words(checkpoint, num_tokens: int = 400) -> str:
    """What the run that wrote the checkpoint has reached, in a few lines; empty when its tokens are no
    bytes."""
    tg, loaded = checkpoints.import_trainer(), checkpoints.load_model(checkpoint, device="cpu", compile="off")
    c, facts = loaded.config, loaded.facts
    if checkpoints.tokenizer_name(loaded) != "bytes":
        return ""
    train, val = (tg.TokenStream(tg.find_shards(files, what), c.vocab_size)
                  for files, what in ((c.train_files, "train"), (c.val_files, "val")))
    losses = {"this model": evaluate.loss_on(loaded, c.val_files, c.val_tokens, leave_out=c.eod_id)["loss"],
              "a bigram table": bigram_loss(c, train, val)}
    lines = [f"{name}: {nats:.4f} nats/byte, {nats / math.log(2):.4f} bits/byte on held-out text"
             for name, nats in losses.items()]
    text = "".join(sample.sample(loaded, "\n\nThe ", num_tokens, 0.8, 50, c.seed))
    lines += ["a sample of what it writes:", *(f"    | {line}" for line in text.splitlines())]
    tokens_per_s = facts["tokens"] / facts["total_ms"] * 1e3
    lines.append(f"{tokens_per_s:,.0f} tokens/s on this machine; a GPU would train the real thing: ./run.sh on "
                 "one to eight H100s with FineWeb shards")
    lines.append(f"the log is {Path(c.log_dir) / facts['run']['run_id']}.txt")
    return "\n".join(lines)


class Bar:
    """On a terminal, a progress bar in place of the lines of training steps; all else is printed above it. A
    terminal that goes away, or a full disk behind the output, ends the show and not the training."""

    def __init__(self, terminal: bool | None = None):
        self.bar, self.gone = None, False
        with self.show():
            self.bar = tqdm(disable=None if terminal is None else not terminal, unit=" steps", mininterval=0)

    @contextlib.contextmanager
    def show(self):
        """What is shown in this block is the last when it can't be shown."""
        try:
            yield
        except (OSError, ValueError):                        # ValueError: the stream is closed
            self.gone = True
            checkpoints.drop_dead_output()

    def event(self, log, text: str) -> None:
        """RunLog.event, for a log."""
        log.write(text)
        if not log.path or self.gone or self.bar is None:
            return
        step = re.match(r"step:(\d+)/(\d+) train_loss:(\S+)", text)
        with self.show():
            if step and not self.bar.disable:
                self.bar.total = int(step[2])
                self.bar.set_postfix_str(f"loss {step[3]}", refresh=False)
                self.bar.update(int(step[1]) - self.bar.n)
            else:
                self.bar.write(text)
                sys.stdout.flush()

    def close(self) -> None:
        with self.show():
            if self.bar is not None and not self.gone:
                self.bar.close()


def main(argv: list[str]) -> int:
    began, tg, bar = time.time_ns(), checkpoints.import_trainer(), Bar()
    tg.RunLog.event = lambda log, text: bar.event(log, text)
    code = tg.main(argv)
    bar.close()
    if code or {"--help", "-h"} & set(argv) or os.environ.get("RANK", "0") != "0":
        return code
    config, _ = tg.parse_config(argv, "demo")
    written = Path(config.checkpoint_dir).glob("*/step_*/checkpoint.json")
    fresh = {path.stat().st_mtime_ns: path.parent for path in written if path.stat().st_mtime_ns >= began}
    if fresh and not bar.gone:
        words = closing_words(fresh[max(fresh)])
        with bar.show():
            print(words, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
