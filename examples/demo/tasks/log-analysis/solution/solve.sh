#!/bin/sh
exec python3 /solution/report.py /app/access.log /app/report.json
