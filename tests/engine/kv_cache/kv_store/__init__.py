"""Tests of the K/V store and the connector to it."""
