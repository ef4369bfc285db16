"""HTTP clients for servers of this machine, which speak no TLS. httpx would read every certificate authority of the
system for each client that it makes, 40 ms each time, and the tests make thousands."""

import ssl
from functools import partial

import httpx

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody

client = partial(httpx.Client, verify=NO_TLS)
get = partial(httpx.get, verify=NO_TLS)
post = partial(httpx.post, verify=NO_TLS)
request = partial(httpx.request, verify=NO_TLS)
stream = partial(httpx.stream, verify=NO_TLS)
