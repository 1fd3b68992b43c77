"""A published model with the logits that transformers has for some prompts, and what is checked of
each such model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import GREEDY, random_ids, run_in_process
from published_models import Published
from stage_driver import Driver
from tiny_models import tiny_plan
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import read_model_args
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint

TOLERANCE = 1e-4
LENGTHS = (120, 37, 3)  # the longest is beyond the 32 positions of the original context
# numbers of stages, and the chunks of the longest prompt
CUTS = {"whole": (1, [120]), "cut": (2, [5, 1, 15, 16, 17, 1, 33, 32])}


@dataclass(frozen=True)
class Case:
    name: str
    published: Published
    prompts: list[list[int]]
    logits: list[Tensor]  # transformers'

    @classmethod
    def of(cls, name: str, published: Published) -> "Case":
        prompts = [random_ids(n, seed=n, vocab_size=128) for n in LENGTHS]
        return cls(name, published, prompts, [published.logits(prompt) for prompt in prompts])

    @property
    def args(self) -> ModelArgs:
        return read_model_args(self.published.folder)

    def check_logits(self, stages: int, cut: Sequence[int]) -> None:
        """Assert that the stages have transformers' logits."""
        folder, args = self.published.folder, self.args
        assert Checkpoint(folder).check(args) == "float32"
        plan = tiny_plan(args, min(stages, len(args.layer_groups)))
        driver = Driver(plan, [StageWorker.load(stage, folder) for stage in plan.stages])
        found = driver.run(self.prompts, [list(cut), [30, *[1] * 7], [3]])
        for ours, theirs in zip(found, self.logits, strict=True):
            assert theirs.std() > 0.1
            torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)

    def check_greedy_tokens(self) -> None:
        """Assert that 1, 2 and 4 stages, or as many as there may be, choose the same tokens."""
        args, outputs = self.args, []
        for stages, page_size in ((1, 16), (2, 8), (4, 32)):
            plan = tiny_plan(args, min(stages, len(args.layer_groups)), page_size)
            workers = [StageWorker.load(stage, self.published.folder) for stage in plan.stages]
            outputs.append(run_in_process(plan, workers, self.prompts, GREEDY))
        assert outputs[0] == outputs[1] == outputs[2]
        for tokens, logits in zip(outputs[0], self.logits, strict=True):
            assert tokens[0] == logits[-1].argmax().item()
