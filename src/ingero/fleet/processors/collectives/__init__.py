"""The ``nccl`` processor: from collective records to named culprits, their victims and what it cost.

Takes columnar collective batches (logs) and the per-event gauges of older agents (metrics), and passes both on. A push
costs decoding and an append; judging runs on its own thread every ``judge_interval``, so a verdict is at most one push
interval, ``reorder_window`` and two judge intervals old. Judges nothing itself: that is `ingero.detect.judge`.
"""
