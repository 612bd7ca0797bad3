"""OTLP into columns: decode, find out whose rows they are, refuse what the bearer may not write, hand to the store.

Above ``db``; below ``service``, which mounts it. Refuses rows of clusters outside the bearer's list, whole request at
a time, so that a sender sees a refusal instead of a hole.
"""
