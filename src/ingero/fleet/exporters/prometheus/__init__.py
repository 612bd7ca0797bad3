"""The ``prometheus`` exporter: the latest point of every series, for a scraper to fetch.

A push costs it a reference; exports are walked when the drain timer or a scrape comes. Sends nothing anywhere itself.
"""
