"""A whole agent: it asks the model once and prints the reply."""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

address = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(address.netloc)
body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read()}]})
key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
connection.request("POST", f"{address.path}/chat/completions", body, key)
print(json.load(connection.getresponse())["choices"][0]["message"]["content"])
