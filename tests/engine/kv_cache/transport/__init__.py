"""Tests of transfer engines behind the connector."""
