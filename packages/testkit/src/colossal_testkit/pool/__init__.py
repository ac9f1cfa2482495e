"""The processes behind ``run_ranks``, and what travels between them.

::

    pytest ── commands ──> forkserver (torch imported once, one thread)      server
       │                        │ fork: a few milliseconds each
       │                        ├── worker 0 (also serves the rendezvous store)
       ├── jobs, reports ──────>├── worker 1                                 worker, groups
       │                        └── ...
       └── output files, one for each worker (stdout, stderr, stacks)

Every process asks the kernel to die with its parent, and every worker also ends when its parent's end of a
socket closes, so that nothing is left however pytest ends. What travels is pickled: jobs name their function
by file and qualified name (``references``), tensors go by value (``values``), outcomes come back as reports
(``messages``). ``crew`` is the side of the parent.
"""

from __future__ import annotations
