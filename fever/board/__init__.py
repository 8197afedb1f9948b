"""`fever board`: a live page of all runs in a folder. It reads run directories and nothing else.

| file | what it does |
|---|---|
| `server.py` | the server: addresses, live events, start and stop |
| `guard.py` | who may ask what: Host and Origin headers, the token, what browsers may load |
| `listing.py` | which runs there are, and a row for each |
| `details.py` | everything about one run but its curves |
| `curves.py` | metrics, episodes and means over seeds, thinned |
| `live.py` | what has changed since the last look |
| `static/` | the page: plain JavaScript modules, no build step |
"""
