"""One step: the train step, the record, the layout of parameters, the replica.

Used alike by a worker, which takes steps, and by a checkpoint actor, which merges them. No Ray.
"""
