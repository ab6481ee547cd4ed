"""Has what DeepSpeed asks of the processor and of the compiler answered once: each answer takes a second.

Processes that are forked from one that has imported this know the answers.
"""

import functools

import cpuinfo
import deepspeed

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()  # which each of DeepSpeed's CPU ops asks for anew
deepspeed.ops.__compatible_ops__  # noqa: B018 - compiles small programs, one for each op
