"""Recorded training traces, turned into what agents would have reported.

Beside ``wire``, above ``detect``: the replay command and the detection benchmark both read here. Refuses to judge
anything and to open a connection.
"""
