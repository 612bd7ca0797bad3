"""An authorization server's half of the work: keys, their JWK set, and signed access tokens."""

import json
import time

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER = "https://login.example/realms/site"
RESOURCE = "https://echo.example:8081/mcp"


class Issuer:
    """Signs with one key that it publishes as a JWK set in ``file``."""

    def __init__(self, file, name="k1"):
        self.file, self.name = file, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.publish()

    def publish(self):
        public = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.file.write_text(json.dumps({"keys": [public | {"kid": self.name, "alg": "ES256"}]}))

    def sign(self, drop=(), key=None, kid=None, **claims):
        usual = {"iss": ISSUER, "aud": RESOURCE, "sub": "ada", "exp": int(time.time()) + 3600}
        given = {name: value for name, value in (usual | claims).items() if name not in drop}
        headers = {"kid": kid or self.name}
        return jwt.encode(given, key or self.key, algorithm="ES256", headers=headers)
