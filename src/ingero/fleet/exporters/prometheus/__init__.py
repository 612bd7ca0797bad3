"""The ``prometheus`` exporter: the latest point of every series, for a scraper to fetch.

Exports that repeat are stored in the push; others cost it a reference, and are walked when the drain timer or a scrape
comes. Sends nothing anywhere itself.
"""
