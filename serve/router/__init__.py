"""The router: which engine gets a request, and what becomes of requests when engines die."""
