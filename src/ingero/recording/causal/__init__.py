"""Why it was slow: a recording in, incidents out.

Pure. No clock, file, thread or environment is read here, the same recording always gives the same incidents in the same
order, and a cause is named only with the share of the lost time that it was seen to take.
"""
