"""The ``ingero`` processor: who is grossly worse than its peers now, and the threshold that each agent is answered.

Takes metrics, keeps the latest health score of each node, passes everything on unchanged. Judges nothing itself: the
statistics are `ingero.detect.threshold`. It answers no push either: it offers a `ThresholdSource`, and the
``ingero_threshold`` extension answers.
"""
