"""The ``ingero_threshold`` extension: answers pushes and requests with thresholds, and shows admin pages.

Computes nothing and knows no component: thresholds come from components that offer a `ThresholdSource`, pages from
those that offer `AdminRoutes`, both found when they are needed because their owners start later.
"""
