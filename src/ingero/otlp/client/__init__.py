"""The client side of OTLP, shared by everything that sends it: endpoints, HTTP, gRPC, and what became of a request.

A sender sends once and reports; whether to send again is its caller's decision, for which `SendReply` says all there
is.
"""
