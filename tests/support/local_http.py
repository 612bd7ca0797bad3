"""httpx for servers of this machine: it does not read the web's certificate authorities for each client.

That takes 15 ms of a processor, so a test that polls with `httpx.get` would take one from what it waits for. Requests by
TLS name whom they trust, as ``verify``.
"""

import ssl
from functools import partial

import httpx

TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=TRUSTS_NOBODY)
post = partial(httpx.post, verify=TRUSTS_NOBODY)
put = partial(httpx.put, verify=TRUSTS_NOBODY)
delete = partial(httpx.delete, verify=TRUSTS_NOBODY)
request = partial(httpx.request, verify=TRUSTS_NOBODY)
stream = partial(httpx.stream, verify=TRUSTS_NOBODY)
open_client = partial(httpx.Client, verify=TRUSTS_NOBODY)
open_async_client = partial(httpx.AsyncClient, verify=TRUSTS_NOBODY)
