#!/bin/sh
printf 'hello, world\n' > /app/greeting.txt
