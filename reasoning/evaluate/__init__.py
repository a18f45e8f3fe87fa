"""Measures accuracy against cost: ways of answering, measured on tasks; `judging` has the comparisons."""

from reasoning.evaluate.judging import BadAnswer, Choices, Judge, Puzzle, judge_of
from reasoning.evaluate.measure import BadWay, MeasuredWay, Task, Way, measure, wilson

__all__ = [
    "BadAnswer",
    "BadWay",
    "Choices",
    "Judge",
    "MeasuredWay",
    "Puzzle",
    "Task",
    "Way",
    "judge_of",
    "measure",
    "wilson",
]
