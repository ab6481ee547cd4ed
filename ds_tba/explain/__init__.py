"""Answers for the user: who holds memory in a step, and what helps where it runs out."""
