"""What every program that answers requests shares: questions, bearers, limits, TLS, the HTTP runner, MCP.

Above the wire and below the three programs. Holds no answer itself: a program brings its questions as a literal tuple
of `ingero.serving.query.Query`, and this package asks them over HTTP and MCP alike. Refuses to serve without saying
to whom: nothing here listens before it was given an authenticator or the decision to have none.
"""
