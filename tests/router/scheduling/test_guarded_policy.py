"""A defect of the policy: requests continue with a simple one, and the log says so once."""

import logging
from collections.abc import Sequence

import pytest
from fake_pipeline import FakeStages
from harness import random_ids

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, FixedInFlightPolicy, SchedulerState
