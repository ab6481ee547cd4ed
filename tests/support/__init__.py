"""Modules that tests share: doubles of devices, disks and faults, hazards, programs that run trainings."""
