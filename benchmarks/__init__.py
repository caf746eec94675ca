"""Measures tensorplay beside torch.distributed.rpc and Ray: ``python -m benchmarks``.

Bytes of the harness that are worth knowing apart:

==================  ===========================================================================
``plan``            what is measured: stages, measurements, systems
``tasks``           the measured loops; they run in a client's process, the same for every system
``functions``       what the workers run
``systems/``        how each system is started, joined and called, behind one protocol
``processes``       a group: the processes of one system, and the pipes to its clients
``machine``         what the machine is, and how busy others keep it meanwhile
``runner``          starts the groups, takes turns between them, repeats, collects
``results``         medians, spreads, ratios, and which cells were disturbed
``targets``         what is to be reached
``report``          Markdown and JSON; ``picture`` draws
==================  ===========================================================================
"""
