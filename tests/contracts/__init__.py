"""Suites that a store or a backend passes, each one class to subclass, also for those that live elsewhere."""
