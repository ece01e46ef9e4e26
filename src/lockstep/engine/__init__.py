"""The training loop and what it is assembled from."""

from __future__ import annotations

from lockstep.runtime import env

# Before torch is loaded: on a busy CPU, threads that spin while they wait made training ten times slower (measured).
env.setdefault("OMP_WAIT_POLICY", "passive")
env.setdefault("GOMP_SPINCOUNT", "1000")
