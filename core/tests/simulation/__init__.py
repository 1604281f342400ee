"""Deterministic simulation: whole engines on virtual time, where one seed replays one run.

A run draws from its seed what the world is like (tiers, policies, bounds, faults, how threads are scheduled), lets
clients call every verb of one or two engines over stores that go wrong in many ways, takes processes away in the
middle of what they do, and asks an oracle after every operation and at the end whether all promises were kept:

- never wrong bytes: KV is a function of model, salt and tokens, so all that comes back is checked in full, and all that
  should not have been touched too, also long after a verb was given up;
- never past a deadline: `oracle.Allowance` says how long each verb may take, in virtual time;
- exact accounts: ledgers hold what stores hold, key by key, and keep to capacity, quotas and ttl; every byte of the
  pool has one owner; no lease is lost;
- no late write: free memory is poisoned, and a call that was given up long ago must still find its memory its own;
- what was removed stays away, what has expired is not served, what is pinned stays;
- progress: nobody waits for ever, and once faults stop every tier serves again.

A seed runs with `make simulate SEED=7`, and what happened in it is printed with `ARGS=--trace`. From this folder's
parent, `python -m simulation --help` says more; `--total 1000000 --jobs 2` runs that many operations over fresh seeds.
Seeds that once failed are in `seeds.txt`, and `make test-full` runs them again, before 200,000 operations of fresh ones
(or `SIMULATION_OPS` of them). They stand for the run in which they failed
only while the simulation draws as it did then: a bug worth remembering has a test of its own as well.

Where things are:

- `fibers`: virtual time and the scheduler; `runtime`: the `Runtime` that the core is given;
- `interrupts`: threads that may be interrupted before any statement of the core, in some of the seeds;
- `store`, `plugin`: stores that fail, and the backend, connector and serializer through which the core meets them;
- `content`, `clients`, `layerwise`, `world`: what is stored, who calls what, and a whole run;
- `oracle`: what must hold; `peek`: all that is known here of the core's private parts;
- `planted`: bugs put into the core on purpose, each of which the oracle must find;
- `campaign`: many seeds, on several processors.
"""
