"""Behind ``ingero replay``: what was concluded about a recording, by whichever path, and how it is shown.

Offline and network paths meet in `result.build_result`: both end with the Judge's verdicts.
"""
