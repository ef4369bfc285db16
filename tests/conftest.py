"""Shared by all tests: one torch thread (two spinning threads on a busy machine cost seconds a step)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
