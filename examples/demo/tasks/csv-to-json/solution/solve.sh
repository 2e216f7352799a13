#!/bin/sh
exec python3 /solution/convert.py /app/orders.csv /app/customers.json
