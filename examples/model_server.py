#!/usr/bin/env python3
# SPDX-License-Identifier: LGPL-3.0-or-later
"""A model server that learns while simulations run: `model_server.py ADDRESS PORT`.

Inputs, as JSON: POST /learn {"x": {feature: number}, "y": number}, and POST /predict {"x": ...},
which answers each model's guess. GET /metrics says how many samples there were, and each model's
mean error on samples that it had not learned yet. Where $TOKEN is set, requests must carry it.
Samples come one at a time and are kept by nobody, so memory does not grow with their number.
"""

import hmac
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from river import compose, linear_model, metrics, neighbors, preprocessing

# The first three are those of arXiv:2406.06995, which know the extent in each direction and not the
# number of cells. C and eps of the third are 0.01 and 0.1 there, where a unit is one cell and not
# ten, and jobs take twenty times as long.
MODELS = {
    "linear": compose.Discard("one", "cells")
    | preprocessing.StandardScaler()
    | linear_model.LinearRegression(intercept_lr=0.1),
    "bayesian": compose.Discard("one", "cells") | linear_model.BayesianLinearRegression(),
    "passive-aggressive": compose.Discard("one", "cells")
    | linear_model.PARegressor(C=1.0, mode=2, eps=0.005, learn_intercept=False),
    "bayesian-cells": linear_model.BayesianLinearRegression(),
    "neighbours": preprocessing.StandardScaler() | neighbors.KNNRegressor(n_neighbors=3),
}
ERRORS = {name: metrics.MAE() for name in MODELS}
LEARNED = {"samples": 0}
TOKEN = os.environ.get("TOKEN", "").strip()  # a file's, perhaps with the end of its line


def predict(x):
    """Each model's guess."""
    return {name: float(model.predict_one(x)) for name, model in MODELS.items()}


def learn(x, y):
    """Guess first, so that the error is an honest one, then learn."""
    for name, guess in predict(x).items():
        ERRORS[name].update(y, guess)
        MODELS[name].learn_one(x, y)
    LEARNED["samples"] += 1
    return LEARNED


def state():
    """What was learned so far."""
    return {**LEARNED, "mae": {name: error.get() for name, error in ERRORS.items()}}


class Handler(BaseHTTPRequestHandler):
    """One request; the server takes them one by one, since models are not for threads."""

    timeout = 10  # seconds for whoever does not finish a request

    def do_GET(self):
        """Answer /metrics, and the readiness probe, which knows no token."""
        known = {"/metrics": state, "/ready": dict}
        self.answer(known.get(self.path), secret=self.path != "/ready")

    def do_POST(self):
        """Answer /learn and /predict."""
        calls = {"/learn": lambda s: learn(features(s), float(s["y"])),
                 "/predict": lambda s: predict(features(s))}  # fmt: skip
        call = calls.get(self.path)
        length = int(self.headers.get("Content-Length", 0))
        self.answer(call and (lambda: call(json.loads(self.rfile.read(min(length, 65536))))))

    def answer(self, call, secret=True):
        """Call, and say what came of it."""
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {TOKEN}" if TOKEN else given
        try:
            if secret and not hmac.compare_digest(given.encode(), wanted.encode()):
                code, value = 401, {"error": "the token is missing or wrong"}
            else:
                code, value = (200, call()) if call else (404, {"error": "no such path"})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            code, value = 400, {"error": f"not a sample: {error}"}
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def features(sample):
    """A sample's features, all numbers."""
    return {str(name): float(value) for name, value in sample["x"].items()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a pod is not ended by it
    HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
