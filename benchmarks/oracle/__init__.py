"""The planner of November 2026, whole and frozen: every event of a micro-step replayed, every neighbour tried.

What the runtime plans with is simpler; a test holds it to a margin of this one, and ``planner_scale.py`` has its plans
judged here. Nothing is to be improved in this package: that would move the mark.
"""
