"""The site's questions, one `Query` each; `QUERIES` in ``catalog`` lists them all.

Above ``db``, beside ``ingest``. Every statement is ours with bound parameters and runs on a reader with a deadline;
every answer says its window, what it rests on, and what was cut.
"""
