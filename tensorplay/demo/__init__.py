"""The demonstration: a model that is spread over two workers and this process is trained.

It reads scikit-learn's bundled handwritten digits, and shows that training through workers
gives the same losses as training the same model in one process.
"""
