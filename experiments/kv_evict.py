def judge(rows): return []
