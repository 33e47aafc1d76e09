# Sourced by the scripts: steps with their names, times and results. Works without a terminal.

exec </dev/null # nothing here asks anything
unset PYTHONPATH PYTHONHOME MYPYPATH # a checkout runs its own code
unset PYTHONDONTWRITEBYTECODE        # which hundreds of processes would compile again

# 1-based counts of what was run, and the names of what failed.
STEP=0
FAILED=()
# What runs beside: names, moments of start, files of output, process ids, exit codes (empty: it runs).
BESIDE=()
BESIDE_STARTED=()
BESIDE_LOGS=()
BESIDE_PIDS=()
BESIDE_CODES=()
# How many run at a time.
MOST_BESIDE=${MOST_BESIDE:-100}
# When this was said last.
NAPPED=0

say() { printf '%s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Run a command whose output matters only when it fails. On a terminal a spinner shows the seconds and the last line
# of output; otherwise a line now and then says that it is still going on.
#   quietly "what it does" command...
quietly() {
    local title=$1 log pid code=0 started=$SECONDS frame=0 told=0 frames='|/-\'
    shift
    log=$(mktemp)
    say "... $title"
    "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -t 1 ]]; then
            printf '\r\033[K %s %ds  %.70s' "${frames:frame++%4:1}" $((SECONDS - started)) "$(last_line "$log")"
        elif ((SECONDS - started >= told + 15)); then
            told=$((SECONDS - started))
            say "$(printf '    %d s: %.70s' "$told" "$(last_line "$log")")"
        fi
        sleep 0.2
    done
    wait "$pid" || code=$?
    trap - INT TERM
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    if ((code != 0)); then
        say "--- the end of its output:"
        tail -n 40 "$log"
        rm -f "$log"
        die "$title failed (exit code $code)"
    fi
    rm -f "$log"
    say "    done in $((SECONDS - started)) s"
}

last_line() {
    tail -n 5 "$1" | tr '\r' '\n' | sed 's/[^[:print:]]//g' | grep -v '^ *$' | tail -n 1 | shortened || true
}

# What a line of pip's says of a package, without where it is from; at most 70 characters, which end with a word.
shortened() {
    sed -E \
        -e 's/^ +//' \
        -e 's/^(Collecting|Requirement already satisfied:) ([^ ;(]+).*/\1 \2/' \
        -e 's#^(Downloading|Using cached) ([^ ]*/)?([^-/ ]+-[^-/ ]+)[^/ ]*#\1 \3#' \
        -e '/.{71}/s/^(.{1,66}),? .*/\1 .../'
}

# Run a command in the open, note its time and whether it failed, and go on.
#   step "name" command...
step() {
    local title=$1 started=$SECONDS code=0
    shift
    STEP=$((STEP + 1))
    say "==> $STEP. $title"
    "$@" || code=$?
    note_end "$title" "$code" $((SECONDS - started))
}

# Say how a step ended, and after how many seconds.
note_end() {
    if (($2 == 0)); then
        say "    $1: ok, $3 s"
    else
        say "    $1: FAILED (exit code $2), $3 s"
        FAILED+=("$1")
    fi
}

# Run a command beside the next steps, once there is room; its output is shown when `joined` waits for it.
#   beside "name" command...
beside() {
    local log
    while (($(count_beside) >= MOST_BESIDE)); do nap; done
    log=$(mktemp)
    BESIDE+=("$1")
    BESIDE_STARTED+=("$(date +%s)")
    BESIDE_LOGS+=("$log")
    shift
    say "==> beside: ${BESIDE[-1]} (its output comes at the end)"
    "$@" >"$log" 2>&1 &
    BESIDE_PIDS+=($!)
    BESIDE_CODES+=("")
    trap 'kill "${BESIDE_PIDS[@]}" 2>/dev/null || true; rm -f "${BESIDE_LOGS[@]}"; exit 130' INT TERM
}

# Print how many run.
count_beside() {
    local code count=0
    for code in "${BESIDE_CODES[@]}"; do
        if [[ -z $code ]]; then count=$((count + 1)); fi
    done
    printf '%d' "$count"
}

# Note the exit codes of those that have ended. The shell forgets the code of an id that another process of it gets.
collect_codes() {
    local n code
    for n in "${!BESIDE_PIDS[@]}"; do
        if [[ -n ${BESIDE_CODES[n]} ]] || kill -0 "${BESIDE_PIDS[n]}" 2>/dev/null; then continue; fi
        code=0
        wait "${BESIDE_PIDS[n]}" || code=$?
        BESIDE_CODES[n]=$code
    done
}

# Wait for a moment; each minute, say that something runs.
nap() {
    sleep 0.5
    collect_codes
    if ((SECONDS >= NAPPED + 60)); then
        NAPPED=$SECONDS
        say "    after $SECONDS s, $(count_beside) run beside each other"
    fi
}

# Wait for all that runs beside, show each output, and note what failed.
joined() {
    local n
    for n in "${!BESIDE[@]}"; do
        while [[ -z ${BESIDE_CODES[n]} ]]; do nap; done
        STEP=$((STEP + 1))
        say "==> $STEP. ${BESIDE[n]}"
        cat "${BESIDE_LOGS[n]}"
        # It ended when it wrote its last line, which may have been long ago.
        note_end "${BESIDE[n]}" "${BESIDE_CODES[n]}" $(($(stat -c %Y "${BESIDE_LOGS[n]}") - BESIDE_STARTED[n]))
        rm -f "${BESIDE_LOGS[n]}"
    done
    trap - INT TERM
    BESIDE=() BESIDE_STARTED=() BESIDE_LOGS=() BESIDE_PIDS=() BESIDE_CODES=()
}

# Print for how long the processors have been busy, and idle, since the machine started.
read_processors() {
    awk '$1 == "cpu" { print $2 + $3 + $4 + $7 + $8 + $9, $5 + $6 }' /proc/stat
}

# Print for how many percent of the time they have been busy since `read_processors` printed this.
find_busy() {
    awk -v before="$1" '{
        split(before, b)
        busy = $1 - b[1]
        idle = $2 - b[2]
        printf "%d", 100 * busy / (busy + idle + 1e-9)
    }' < <(read_processors)
}

# Say how it went; the exit code of the script.
verdict() {
    if ((${#FAILED[@]} > 0)); then
        say "FAILED after $SECONDS s: ${FAILED[*]}"
        return 1
    fi
    say "all $STEP steps ok, $SECONDS s"
}
