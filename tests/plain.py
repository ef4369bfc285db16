"""HTTP clients for servers of this machine, which speak no TLS and may be slow. httpx would give up after 5 s, and read
every certificate authority of the system for each client that it makes, 40 ms each time, and the tests make thousands.
"""

import ssl
from functools import partial

import httpx

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
PATIENCE_S = 60.0

client = partial(httpx.Client, verify=NO_TLS, timeout=PATIENCE_S)
get = partial(httpx.get, verify=NO_TLS, timeout=PATIENCE_S)
post = partial(httpx.post, verify=NO_TLS, timeout=PATIENCE_S)
request = partial(httpx.request, verify=NO_TLS, timeout=PATIENCE_S)
async_client = partial(httpx.AsyncClient, verify=NO_TLS, timeout=PATIENCE_S)
stream = partial(httpx.stream, verify=NO_TLS, timeout=PATIENCE_S)
