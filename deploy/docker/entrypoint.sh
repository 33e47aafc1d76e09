#!/usr/bin/env bash
# Starts what a pod of this image is: an executor, when Spark made the pod, else tidemill with the pod's arguments.
set -euo pipefail

if [[ ${1:-} != executor ]]; then
    exec tidemill "$@"
fi
# Spark passes Java's options one by one: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 and so on.
options=()
for ((n = 0; ; n++)); do
    name=SPARK_JAVA_OPT_$n
    [[ -v $name ]] || break
    options+=("${!name}")
done
exec java "${options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
