"""Grids of trainings: planned from one file, run once each, and judged with intervals over queries and seeds.

A StudyPlan has StudyRuns; finished runs of one setting are an Arm; a Study computes Estimates over arms, paired by
query and seed; its StudyTables and claims become files and a page. One engine for CLIP and for text (plan.Kind).
May import reporting, evaluation, metrics, config, and of training the signals and the log.
"""

from mmclip.metrics.bootstrap import Estimate
from mmclip.study.arms import Arm, gather
from mmclip.study.estimates import Study
from mmclip.study.plan import StudyPlan, StudyRun, plan_study
from mmclip.study.report import write_study
from mmclip.study.runner import run_study

__all__ = ["Arm", "Estimate", "Study", "StudyPlan", "StudyRun", "gather", "plan_study", "run_study", "write_study"]
